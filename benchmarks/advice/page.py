"""The tables of docs/evidence/advice.md, from the newest kept rows."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from autotune.techniques import Settings
from autotune.words import settings_words

from ..rows import load_rows
from .known import ADVICE, ALL, ON_A_CARD
from .other import OTHERS, SHAPES
from .processes import KINDS
from .ranks import HOOKS

Row = dict[str, Any]
Made = tuple[str, Iterable[Iterator[str]]]
"""A table's header, and its rows' cells."""
_PEAK, _TIME = 0.03, 0.05
"""Relative changes at the median of jobs that are more than none."""
_CELL = ("peak_ratio", "time_ratio", "time_spread")
_BF16 = "bf16"
_ON_CARD = {"llama": "LLaMA, 0.9 B", "gpt2": "GPT-2, 124 M"}
"""Jobs whose steps were timed on a card, in words."""
_WEIGHTS = {"csr": "CSR, 90 % zeros", "bsr": "BSR, 90 % zeros", "int8": "8 bits (`quantize_dynamic`)"}


def verdict(rows: list[Row]) -> str:
    """In words: of the peak at the median of models; of time where most models' rounds are all slower, or all faster,
    and no model's are all the other."""
    peak, time = (statistics.median(row[key] for row in rows) for key in ("peak_ratio", "time_ratio"))
    num_slower, num_faster = (sum(of(row["time_spread"]) for row in rows) for of in (_is_slower, _is_faster))
    saves, takes = peak < 1 - _PEAK, peak > 1 + _PEAK
    slower, faster = (2 * number > len(rows) for number in (num_slower, num_faster))
    if num_slower and num_faster:
        return "less memory, time depends" if saves else "depends"
    slower, faster = slower and time > 1 + _TIME, faster and time < 1 - _TIME
    if saves:
        return "costs time" if slower else "helps"
    if takes:
        return "costs memory" if faster else "worse"
    return "faster" if faster else "worse" if slower else "no effect"


def _is_slower(spread: list[float]) -> bool:
    return spread[0] > 1


def _is_faster(spread: list[float]) -> bool:
    return spread[1] < 1


def _steps() -> Made:
    found = _newest("step")
    return _made(("advice", *ALL, "verdict"), (_step_cells(key, found) for key in ADVICE))


def _step_cells(key: str, found: dict[tuple[str, str], Row]) -> Iterator[str]:
    rows = {model: found[key, model] for model in ADVICE[key].models}
    yield ADVICE[key].words
    for model in ALL:
        yield _cell(rows[model]) if model in rows else ""
    yield verdict([*rows.values()])


def _cell(row: Row) -> str:
    low, high = row["time_spread"]
    return f"{row['peak_ratio']:.2f}·{row['time_ratio']:.2f} ({low:.2f}–{high:.2f})"


def _weights() -> Made:
    found = _newest("weights")
    return _made(("weights", *SHAPES), (_weight_cells(key, found) for key in _WEIGHTS))


def _weight_cells(key: str, found: dict[tuple[str, str], Row]) -> Iterator[str]:
    yield _WEIGHTS[key]
    for model in SHAPES:
        row = found["", model]
        low, high = row["time_spread"][key]
        yield f"{row['bytes_ratio'][key]:.2f}·{row['time_ratio'][key]:.2f} ({low:.2f}–{high:.2f})"


def _ranks() -> Made:
    found = _newest("ranks")
    models = OTHERS["ranks"][1]
    return _made(("exchanged", *models), (_ranks_cells(key, words, found) for key, words in HOOKS.items()))


def _ranks_cells(key: str, words: str, found: dict[tuple[str, str], Row]) -> Iterator[str]:
    yield words
    for model in OTHERS["ranks"][1]:
        row = found["", model]
        low, high = row["time_spread"][key]
        whole, last = row["last_loss"]["whole"], row["last_loss"][key]
        yield f"{row['bytes_ratio'][key]:.2f}·{row['time_ratio'][key]:.2f} ({low:.2f}–{high:.2f})·{last / whole:.2f}"


def _processes() -> Made:
    found = _newest("processes")
    models = OTHERS["processes"][1]
    return _made(("processes", *models), (_process_cells(key, words, found) for key, (words, _) in KINDS.items()))


def _process_cells(key: str, words: str, found: dict[tuple[str, str], Row]) -> Iterator[str]:
    yield words
    for model in OTHERS["processes"][1]:
        row = found["", model]
        yield "refused" if key in row["refused"] else _cell({name: row[name][key] for name in _CELL})


def _card() -> Made:
    found = _newest("predicted")
    models = OTHERS["predicted"][1]
    rows = [["stock, MiB", *(f"{found['', model]['peak_mib']:.0f}" for model in models)]]
    rows += [
        [words, *("" if (ratio := found["", model]["peak_ratio"][key]) is None else f"{ratio:.2f}" for model in models)]
        for key, (words, _) in ON_A_CARD.items()
    ]
    return _made(("predicted", *models), map(iter, rows))


def _on_card() -> Made:
    """Peak of tensors and time of a step, over bf16's of the same job."""
    rows: dict[str, dict[str, list[Row]]] = {}
    for row in load_rows("cards-own-time", "cuda"):
        if "step_s" in row:
            rows.setdefault(_on_card_words(row), {}).setdefault(row["job"], []).append(row)
    stock = rows.pop(_BF16)
    cells = ([words, *(_over(found.get(job), stock[job]) for job in _ON_CARD)] for words, found in rows.items())
    return _made((f"over {_BF16}", *_ON_CARD.values()), map(iter, cells))


def _on_card_words(row: Row) -> str:
    """Of bf16, what is beside it."""
    settings = Settings.model_validate(row["settings"])
    beside = settings if settings.precision.kind != _BF16 else settings.having(type(settings.precision)())
    words = settings_words(beside) if any(beside.chosen()) else _BF16
    return words if settings.precision.kind != "default" else "fp32"


def _over(rows: list[Row] | None, stock: list[Row]) -> str:
    if rows is None:
        return ""
    (seconds, peak), (stock_s, stock_peak) = (
        (sorted(itertools.chain(*(row["step_s"] for row in each))), max(row["allocated_bytes"] for row in each))
        for each in (rows, stock)
    )
    ratio = statistics.median(seconds) / statistics.median(stock_s)
    low, high = seconds[0] / stock_s[-1], seconds[-1] / stock_s[0]
    return f"{peak / stock_peak:.2f}·{ratio:.2f} ({low:.2f}–{high:.2f})"


def _made(header: tuple[str, ...], rows: Iterable[Iterator[str]]) -> Made:
    return f"|{'|'.join(header)}|", rows


def _newest(part: str) -> dict[tuple[str, str], Row]:
    """The last row of each advice, where there is one, and model."""
    return {(row.get("advice", ""), row["model"]): row for row in load_rows("advice", "cpu") if row["part"] == part}


TABLES: dict[str, Callable[[], Made]] = {
    "advice": _steps,
    "advice: weights": _weights,
    "advice: ranks": _ranks,
    "advice: processes": _processes,
    "advice: card": _card,
    "advice: on a card": _on_card,
}
"""By the names that the page has."""
