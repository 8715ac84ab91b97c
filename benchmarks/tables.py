"""The tables of docs/, from the newest rows under benchmarks/results/: `python -m benchmarks.tables` writes them anew.

A table stands under a comment that names it: `<!-- table: layers -->`.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .advice.page import TABLES as ADVICE_TABLES
from .layer_models import MODELS
from .rows import HERE, load_rows
from .single_layers import LAYERS
from .technique_pairs import matrix

Row = dict[str, Any]
_MODEL_HEADER = "|model|kept by stock, MiB|peer|here|peak: peer|here|time: peer|here|"
_LAYER_HEADER = "|layer|stock|peer|here|peak|time|"


_DOCS = HERE.parent / "docs"
_EVIDENCE = _DOCS / "evidence"
PAGES = (
    _DOCS / "inside" / "layers.md",
    *(_EVIDENCE / f"{name}.md" for name in ("layers-measured", "advice", "figures")),
)
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
    return re.sub(r"(<!-- table: (.+) -->\n)(?:\|.*\n)*", lambda found: f"{found[1]}{drawn(found[2])}\n", text)


def drawn(name: str) -> str:
    """A table, by its name.

    Raises:
        KeyError: none of this name is known.
    """
    return _table(*ADVICE_TABLES[name]()) if name in ADVICE_TABLES else _TABLES[name]()


def _model_table() -> str:
    """Each model, as built, with exact layers."""
    rows = _newest("exact", "model")
    return _table(_MODEL_HEADER, (_model_cells(model, rows[model, "as built"]) for model in MODELS))


def _layer_table() -> str:
    """Each layer that keeps less than stock's, by what trains; the others in one row. Of a layer that there is in one,
    two and three dimensions, two."""
    rows = _newest("exact", "layer")
    every = [rows[name, case] for name, layer in LAYERS.items() for case, _ in layer.cases()]
    saves = [row["kept_bytes"]["ours"] < row["kept_bytes"]["stock"] for row in every]
    others = [row for row, less in zip(every, saves, strict=True) if not less]
    shown = [row for row in itertools.compress(every, saves) if not re.search(r"[13]d", row["layer"])]
    return _table(_LAYER_HEADER, [*map(_layer_cells, shown), _other_cells(others)])


def _newest(kind: str, of: str) -> dict[tuple[str, str], Row]:
    """The last row of each model or layer (``of``) and case, at its largest batch."""
    rows = sorted(load_rows("layers", "cpu"), key=lambda row: row.get("batch", 0))
    return {(row[of], row["case"]): row for row in rows if of in row and row["kind"] == kind}


def _table(header: str, rows: Iterable[Iterator[str]]) -> str:
    rule = "|" + "---|" * (header.count("|") - 1)
    return "\n".join([header, rule, *(f"|{'|'.join(cells)}|" for cells in rows)])


def _model_cells(name: str, row: Row) -> Iterator[str]:
    yield from (name, f"{row['kept_bytes']['stock'] / 2**20:.0f}")
    yield from (_of_peer(row, row["kept_ratio"], 3), f"{row['kept_ratio']['ours']:.3f}")
    yield from (_of_peer(row, row["peak_ratio"], 2), f"{row['peak_ratio']['ours']:.2f}")
    low, high = row["time_spread"]["ours"]
    yield _of_peer(row, row["time_ratio"], 2)
    yield f"{row['time_ratio']['ours']:.2f} ({low:.2f}–{high:.2f})"


def _layer_cells(row: Row) -> Iterator[str]:
    kept = {key: value / row["input_bytes"] for key, value in row["kept_bytes"].items()}
    frozen = ", frozen" if row["case"] == "frozen" else ""
    yield from (f"{row['layer']}{frozen}", f"{kept['stock']:.3f}", _of_peer(row, kept, 3), f"{kept['ours']:.3f}")
    yield from (f"{row[key]['ours']:.2f}" for key in ("peak_ratio", "time_ratio"))


def _other_cells(rows: Sequence[Row]) -> Iterator[str]:
    times = sorted(row["time_ratio"]["ours"] for row in rows)
    yield from (f"the other {len(rows)}", "", "", "as stock", "")
    yield f"{statistics.median(times):.2f} ({times[0]:.2f}–{times[-1]:.2f})"


def _of_peer(row: Row, found: dict[str, float], digits: int) -> str:
    if row["peer_error"] is not None:
        return "raises"
    return f"{found['peer']:.{digits}f}" if "peer" in found else "–"


def _pair_table() -> str:
    """Each technique with each one before it, by the newest row of each model in which the pair was tried."""
    newest: dict[tuple[str, str], dict[str, int]] = {}
    for row in load_rows("technique-pairs", "cpu"):
        newest |= {(row["model"], pair): found for pair, found in row.get("cells", {}).items()}
    tried = [{"cells": {pair: found}} for (_, pair), found in newest.items()]
    cells = (f"|{name}|`{letters or '·'}`|" for name, letters in matrix(tried))
    return "\n".join(["|technique|with those above it, from the top|", "|---|---|", *cells])


def _smallest_table() -> str:
    """Each job's least memory, before and now."""
    rows = {row["model"]: row for row in load_rows("smallest", "cpu") if row.get("measured", True)}
    return _table("|job|as it stands, MiB|before|now|by|", map(_smallest_cells, rows.values()))


def _smallest_cells(row: Row) -> Iterator[str]:
    least = {key: min(row[key]["peak_mib"].values()) for key in ("stock", "older", "today")}
    yield from (row["model"], f"{least['stock']:.0f}", f"{least['older']:.0f}")
    yield f"{least['today']:.0f} ({row['ratio']:.2f})"
    chosen = row["today"]["settings"]
    kinds = [name for name in chosen if name != "batch"]
    yield "+".join(f"`{name}`" for name in (*kinds, row["today"]["allocator"]))


_TABLES: dict[str, Callable[[], str]] = {
    "models": _model_table,
    "layers": _layer_table,
    "pairs": _pair_table,
    "smallest": _smallest_table,
}


if __name__ == "__main__":
    main()
