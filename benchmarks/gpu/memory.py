"""Budgets on a card: held in trials and in jobs, and what happens where memory runs out or others hold it."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

from autotune.plan import Budget, Plan
from autotune.techniques import Settings
from autotune.units import MIB
from autotune.workers import Lost, Measured, OutOfMemory

from .check import Check, Found
from .place import GPT, Place, task, used_bytes

_MARGIN = 0.03
_JOB_OVER_PLAN = 0.03
_BACK_S = 5.0
_DISTURBED = 0.2
_SHARES = (1.0, 0.85, 0.7)
"""Of what the reference takes, less its context."""


def _budgets(place: Place) -> dict[str, list[tuple[int, Any]]]:
    """Trials of a task of one shape and of one whose shapes vary, at three budgets each, with what NVML saw."""
    found = {}
    for source in (GPT, task("varying")):
        peak = place.measured(source, largest_of=64 if source != GPT else None).peak
        context = peak.process - (peak.reserved or 0)
        rows = []
        for share in _SHARES:
            limit = round((context + share * (peak.reserved or 0)) / (1 - _MARGIN))
            with place.watch() as watch:
                outcome = place.trial(source, limit=limit, largest_of=64 if source != GPT else None)
            rows.append((limit, watch.most_bytes, outcome))
        found[source.rpartition("/")[2]] = rows
    return found


def _budget(place: Place) -> Found:
    """What NVML sees of trials that are held to a budget."""
    figures, is_within = [], True
    for source, rows in _budgets(place).items():
        for share, (limit, most, outcome) in zip(_SHARES, rows, strict=True):
            fits = isinstance(outcome, Measured) and outcome.measurement.peak.process * (1 + _MARGIN) <= limit
            is_within &= most <= limit and (share < 1 or fits)
            row = {"task": source, "limit_mib": limit >> 20, "seen_mib": most >> 20, "outcome": outcome.kind}
            figures.append({**row, "fits": fits})
    over = sum(row["seen_mib"] > row["limit_mib"] for row in figures)
    least = [row["fits"] for row in figures][:: len(_SHARES)]
    words = f"{over} of {len(figures)} trials above their budget; what fits at 97 % of it is found to fit: {least}"
    return Found(words, is_within, {"trials": figures})


def _plan(place: Place, source: str, limit: int) -> Path:
    """The job as it stands, with a budget."""
    path = place.folder / f"{source.rpartition(':')[2].rpartition('/')[2].removesuffix('.py')}.yaml"
    Plan(budget=Budget(limit=limit, device="cuda"), settings=Settings()).save(path)
    return path


def _job(place: Place) -> Found:
    """Jobs of many steps, in their own order, under the plan of a trial."""
    figures, is_within = [], True
    for source in (GPT, task("varying")):
        found = place.measured(source, largest_of=64 if source != GPT else None)
        limit = round(found.peak.process * (1 + 2 * _MARGIN))
        path = _plan(place, source, limit)
        with place.watch() as watch:
            place.job(source, path, 20 if place.is_quick else 500)
        over_plan = watch.most_bytes / found.peak.process - 1
        is_within &= watch.most_bytes <= limit and over_plan <= _JOB_OVER_PLAN
        figures.append({"task": path.stem, "limit_mib": limit >> 20, "seen_mib": watch.most_bytes >> 20})
        figures[-1]["over_plan"] = round(over_plan, 4)
    told = ", ".join(f"{row['task']} {row['over_plan']:+.1%} of its plan's peak" for row in figures)
    return Found(told, is_within, {"jobs": figures})


_RUNS_OUT = {
    "a tensor": ("out_of_memory", "out_of_memory"),
    "a convolution": ("out_of_memory_in_convolution", "out_of_memory"),
    "the host": ("out_of_host_memory", "failed"),
}
"""By what runs out, the task, and the outcome that is right."""


def _out_of_memory(place: Place) -> Found:
    """What each kind of memory that runs out is called, and whether the next trial runs."""
    limit = 1024 * MIB
    figures = {}
    for name, (source, _) in _RUNS_OUT.items():
        figures[name] = place.trial(task(source), limit=limit).kind
    figures["a handle on a full card"] = place.alone(fails_on_a_full_card)
    figures["halving"] = place.alone(halved)
    figures["the next trial"] = place.trial(task("varying"), limit=limit).kind
    right = {name: kind for name, (_, kind) in _RUNS_OUT.items()}
    right |= {"a handle on a full card": "out of memory", "halving": "halved", "the next trial": "measured"}
    wrong = [f"{name}: {kind}" for name, kind in figures.items() if kind != right[name]]
    return Found("each is named rightly" if not wrong else "; ".join(wrong), not wrong, figures)


def halved() -> str:
    """Whether a step that does not fit goes on with half the micro-batch, as ``apply`` is asked to."""
    import torch

    from autotune.training.apply_plan import apply

    from .tasks import words

    training = apply(Plan(settings=Settings(), budget=Budget(device="cuda")), words(), halve_when_out_of_memory=True)
    batches = iter(training.loader)
    training.step(next(batches))
    most, total = torch.cuda.max_memory_reserved(), torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    kept = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((kept + (most - kept) * 0.7) / total)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        training.step(next(batches))
    return "halved" if any("micro-batch" in str(one.message) for one in seen) else "not halved"


def fails_on_a_full_card() -> str:
    """The first matrix product where no memory is left for cuBLAS: what it raises, as this package calls it."""
    import torch

    from autotune.training.out_of_memory import is_out_of_memory

    held = []
    for size in (256 * MIB, 2 * MIB):
        try:
            while True:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            continue
    try:
        torch.nn.functional.linear(*(held[-1][: 4 * 4096].view(torch.float32).view(64, 64) for _ in range(2)))
    except Exception as error:  # noqa: BLE001 - what it raises is what is looked at
        return "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"[:200]
    finally:
        held.clear()
    return "out of memory"  # cuBLAS had its memory already: nothing could fail


def _busy(place: Place) -> Found:
    """A trial beside a process that holds most of the card, and beside one that computes on it."""
    needs = place.measured(GPT).peak.process
    with place.holder(share=0.98, computes=False):
        held = place.trial(GPT, limit=None if needs < 64 * MIB else max(needs, used_bytes()))
    with place.holder(share=0.05, computes=True):
        beside = place.trial(task("varying"), trial_time_s=1.0 if place.is_quick else 5.0)
    disturbed = beside.measurement.disturbed if isinstance(beside, Measured) else None
    blamed = isinstance(held, OutOfMemory)
    named = isinstance(held, Lost)
    is_within = not blamed and disturbed is not None and disturbed > _DISTURBED
    words = f"on a full card: {held.kind}{' with its processes' if named else ''}; beside work on the card: "
    words += f"disturbed {disturbed:.0%}" if disturbed is not None else beside.kind
    figures = {"full": held.kind, "message": getattr(held, "message", ""), "disturbed": disturbed}
    return Found(words, is_within, {**figures, "message": figures["message"][:300] if figures["message"] else ""})


def _killed(place: Place) -> Found:
    """A trial that is killed in a step: how long until its memory is back, and whether the next one runs."""
    before = used_bytes()
    outcome = place.trial(task("killed"))
    began_s = time.monotonic()
    while used_bytes() > before + 64 * MIB and time.monotonic() - began_s < 60:
        time.sleep(0.05)
    seconds = time.monotonic() - began_s
    later = place.trial(task("varying"))
    is_within = seconds < _BACK_S and isinstance(later, Measured) and outcome.kind == "crashed"
    return Found(f"{outcome.kind}; memory is back after {seconds:.1f} s; then: {later.kind}", is_within)


CHECKS = (
    Check("budget", "no trial above its budget; one that fits at 97 % of it is found to fit", _budget),
    Check("the job keeps it", "within the budget, and at most 3 % above the plan's peak", _job),
    Check("kinds of out of memory", "each is named rightly, and the search goes on", _out_of_memory),
    Check("busy card", f"not blamed on the configuration; work beside it disturbs more than {_DISTURBED:.0%}", _busy),
    Check("killed trial", f"memory is back within {_BACK_S:.0f} s, and the next trial runs", _killed),
)
