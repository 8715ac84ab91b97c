"""The tables of docs/, from the newest rows under benchmarks/results/: `python -m benchmarks.tables` writes them anew.

A table stands under a comment that names it: `<!-- table: layers -->`.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .layer_models import MODELS
from .rows import HERE, load_rows
from .single_layers import LAYERS

__all__ = ["PAGES", "filled"]

Row = dict[str, Any]
_MODEL_HEADER = "| model | kept by stock, MiB | peer | here | peak: peer | here | time: peer | here |"
_LAYER_HEADER = "| layer | stock | peer | here | least | peak: peer | here | time |"
_PRUNING_HEADER = "| model | parameters | of them left | time | found in | what was left, or why it is refused |"
_SMALLER_HEADER = "| layer 512 → 2048 | numbers stored, of the whole layer's | time, of the whole layer's |"
_MAIN = ("as built", "exact")
_MORE = (("input", "exact"), ("as built", "recompute"), ("as built", "rounding"), ("input", "rounding"))
"""What trains, and the kind of layers, beside all of a model and exact ones."""


_DOCS = HERE.parent / "docs"
PAGES = (_DOCS / "inside" / "layers.md", _DOCS / "evidence" / "layers-measured.md", _DOCS / "more" / "quality.md")
"""What has tables."""


def main() -> None:
    """Write every table of every page anew."""
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


def filled(text: str) -> str:
    """A page with its tables as the rows have them.

    Raises:
        KeyError: a table of this name is not known.
    """
    return re.sub(r"(<!-- table: (.+) -->\n)(?:\|.*\n)*", lambda found: f"{found[1]}{_TABLES[found[2]]()}\n", text)


def _model_table(which: Iterable[tuple[str, str]]) -> str:
    """Each model, by what trains and the kind of layers; not where that kind keeps what exact layers keep."""
    exact = _newest("exact", "model")
    rows = [(case, kind, _newest(kind, "model")) for case, kind in which]
    return _table(
        _MODEL_HEADER,
        (
            _model_cells(", ".join([model, *(what for what in (case, kind) if what not in _MAIN)]), found[model, case])
            for case, kind, found in rows
            for model in MODELS
            if (model, case) in found and (kind == "exact" or _ours(found[model, case]) < _ours(exact[model, case]))
        ),
    )


def _ours(row: Row) -> float:
    return round(row["kept_ratio"]["ours"], 3)


def _layer_table() -> str:
    """Each layer that keeps less than stock's, by what trains; the others in one row."""
    rows = _newest("exact", "layer")
    every = [rows[name, case] for name, layer in LAYERS.items() for case, _ in layer.cases()]
    saves = [row["kept_bytes"]["ours"] < row["kept_bytes"]["stock"] for row in every]
    others = [row for row, less in zip(every, saves, strict=True) if not less]
    return _table(_LAYER_HEADER, [*map(_layer_cells, itertools.compress(every, saves)), _other_cells(others)])


def _newest(kind: str, of: str) -> dict[tuple[str, str], Row]:
    """The last row of each model or layer (``of``) and case, at its largest batch."""
    rows = sorted(load_rows("layers", "cpu"), key=lambda row: row.get("batch", 0))
    return {(row[of], row["case"]): row for row in rows if of in row and row["kind"] == kind}


def _table(header: str, rows: Iterable[Iterator[str]]) -> str:
    rule = "|" + "---|" * (header.count("|") - 1)
    return "\n".join([header, rule, *(f"| {' | '.join(cells)} |" for cells in rows)])


def _model_cells(name: str, row: Row) -> Iterator[str]:
    yield from (name, f"{row['kept_bytes']['stock'] / 2**20:.0f}")
    for key, digits in (("kept", 3), ("peak", 2)):
        yield _of_peer(row, row[f"{key}_ratio"], digits)
        yield f"{row[f'{key}_ratio']['ours']:.{digits}f}"
    yield _of_peer(row, row["time_ratio"], 2)
    low, high = row["time_spread"]["ours"]
    yield f"{row['time_ratio']['ours']:.2f} ({low:.2f}–{high:.2f})"


def _layer_cells(row: Row) -> Iterator[str]:
    kept = {key: value / row["input_bytes"] for key, value in row["kept_bytes"].items()}
    frozen = ", frozen" if row["case"] == "frozen" else ""
    yield from (f"{row['layer']}{frozen}", f"{kept['stock']:.3f}", _of_peer(row, kept, 3), f"{kept['ours']:.3f}")
    yield "" if row["least"] is None else f"{row['least']:.3f}".rstrip("0").rstrip(".")
    yield _of_peer(row, row["peak_ratio"], 2)
    yield from (f"{row[key]['ours']:.2f}" for key in ("peak_ratio", "time_ratio"))


def _other_cells(rows: Sequence[Row]) -> Iterator[str]:
    times = sorted(row["time_ratio"]["ours"] for row in rows)
    yield from (f"the other {len(rows)}", "", "", "as stock", "", "", "")
    yield f"{statistics.median(times):.2f} ({times[0]:.2f}–{times[-1]:.2f})"


def _pruning_table() -> str:
    """The last row of each model."""
    rows = {row["model"]: row for row in load_rows("pruning", "cpu")}
    return _table(_PRUNING_HEADER, map(_pruning_cells, rows.values()))


def _pruning_cells(row: Row) -> Iterator[str]:
    yield from (row["model"], f"{row['parameters']:,}")
    if "refused" in row:
        yield from ("refused", "", "", row["refused"].removeprefix("settings.pruning: "))
        return
    ratios = sorted(cut_s / whole_s for whole_s, cut_s in row["processor_s"])
    yield f"{row['parameters_left'] / row['parameters']:.2f}"
    yield f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    yield from (f"{row['cut_s']:.0f} s", "; ".join(row["left"]))


def _smaller_table() -> str:
    """The last row of each layer."""
    rows = {row["layer"]: row for row in load_rows("smaller-layers", "cpu")}
    return _table(_SMALLER_HEADER, map(_smaller_cells, rows.values()))


def _smaller_cells(row: Row) -> Iterator[str]:
    yield from (row["layer"], f"{row['numbers'] / row['numbers_whole']:.2f}")
    ratios = sorted(ours_s / whole_s for whole_s, ours_s in row["processor_s"])
    yield f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def _of_peer(row: Row, found: dict[str, float], digits: int) -> str:
    if row["peer_error"] is not None:
        return "raises"
    return f"{found['peer']:.{digits}f}" if "peer" in found else "–"


_TABLES: dict[str, Callable[[], str]] = {
    "models": lambda: _model_table([_MAIN]),
    "models, more": lambda: _model_table(_MORE),
    "layers": _layer_table,
    "pruning": _pruning_table,
    "smaller layers": _smaller_table,
}


if __name__ == "__main__":
    main()
