"""What a quality process found, as a table for those who ask for its output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .types import RUNGS, Cuts, JudgedCut

_MIB = 2**20


def lines_of(found: Cuts) -> Iterator[str]:
    """Groups of channels with their ratio in the cut that came farthest, then every candidate with its rungs."""
    ended = [cut for cut in found.cuts if cut.qualities and cut.settings.pruning.ratios]
    chosen = dict(min(ended, key=lambda cut: cut.cost).settings.pruning.ratios or ()) if ended else {}
    rows = [
        (
            row.first,
            f"{row.width}",
            " ".join(f"{rise:.3g}" for rise in row.rises),
            f"{1000 * row.seconds:.2f}",
            f"{row.num_bytes / _MIB:.1f}",
            f"{chosen[row.first]:.3g}" if row.first in chosen else "",
        )
        for row in found.groups
    ]
    yield from _aligned(("group", "width", "loss rises by", "ms", "MiB", "ratio"), rows)
    candidates = [_candidate(name, cut) for name, cut in [("reference", found.reference), *_named(found.cuts)]]
    yield from _aligned(("cut", "step", "peak", *(f"{share:.3g}" for share in RUNGS[:-1]), "all seeds", ""), candidates)


def _named(cuts: Sequence[JudgedCut]) -> Iterator[tuple[str, JudgedCut]]:
    for cut in cuts:
        chosen = (one.describe() for one in (cut.settings.pruning, cut.settings.low_rank) if one.kind != "none")
        yield ", ".join(chosen), cut


def _candidate(name: str, cut: JudgedCut) -> tuple[str, ...]:
    rungs = [f"{value:.4g}" for value in cut.rungs]
    seeds = " ".join(f"{one.value:.4g}" for one in cut.qualities)
    shares = ("" if one is None else f"{one:.3f}" for one in (cut.step, cut.peak))
    return (name, *shares, *rungs, *[""] * (len(RUNGS) - 1 - len(rungs)), seeds, cut.ended or "")


def _aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in (headings, *rows) if rows else ():
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
