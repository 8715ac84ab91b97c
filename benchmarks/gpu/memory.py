"""Budgets on a card: held in trials and in jobs, and what happens where memory runs out or others hold it."""

from __future__ import annotations

import importlib.util
import time
import warnings
from pathlib import Path
from typing import Any

from autotune.plan import Budget, Plan
from autotune.techniques import Settings
from autotune.units import MIB
from autotune.workers import Lost, Measured, OutOfMemory

from .check import Check, Found
from .place import Place, name_of, task, used_bytes
from .tasks import hold

_MARGIN = 0.03
_JOB_OVER_PLAN = 0.03
_BACK_S = 5.0
_DISTURBED = 0.2
_SHARES = (1.0, 0.85, 0.7)
"""Of what the reference takes, less its context."""


def _budgets(place: Place) -> dict[str, list[tuple[int, Any]]]:
    """Trials of a task of one shape and of one whose shapes vary, at three budgets each, with what NVML saw."""
    found = {}
    for source, largest_of in _sources(place):
        known = place.measured(source, largest_of=largest_of)
        peak = known.peak
        context = peak.process - (peak.reserved or 0)
        rows = []
        for share in _SHARES:
            limit = round((context + share * (peak.reserved or 0)) / (1 - _MARGIN))
            with place.watch() as watch:
                outcome = place.trial(source, limit=limit, known=known, largest_of=largest_of)
            rows.append((limit, watch.most_bytes, outcome))
        found[name_of(source)] = rows
    return found


def _sources(place: Place) -> tuple[tuple[str, int | None], ...]:
    """A task of one shape and one whose shapes vary, each with the batches that its peak is the largest of."""
    return (place.language, None), (place.varying, 64)


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
    path = place.folder / f"{name_of(source)}.yaml"
    Plan(budget=Budget(limit=limit, device="cuda"), settings=Settings()).save(path)
    return path


def _job(place: Place) -> Found:
    """Jobs of many steps, in their own order, under the plan of a trial."""
    figures, is_within = [], True
    for source, largest_of in _sources(place):
        found = place.measured(source, largest_of=largest_of)
        limit = round(found.peak.process * (1 + 2 * _MARGIN))
        path = _plan(place, source, limit)
        with place.watch() as watch:
            place.job(source, path, 5 if place.is_quick else 500)
        over_plan = watch.most_bytes / found.peak.process - 1
        is_within &= watch.most_bytes <= limit and over_plan <= _JOB_OVER_PLAN
        figures.append({"task": path.stem, "limit_mib": limit >> 20, "seen_mib": watch.most_bytes >> 20})
        figures[-1]["over_plan"] = round(over_plan, 4)
    told = ", ".join(f"{row['task']} {row['over_plan']:+.1%} of its plan's peak" for row in figures)
    return Found(told, is_within, {"jobs": figures})


_OF_HOST = "the host's memory ran out"
_RUNS_OUT = {
    "a tensor": ("out_of_memory", "out_of_memory"),
    "a convolution": ("out_of_memory_in_convolution", "out_of_memory"),
    "the host": ("out_of_host_memory", _OF_HOST),
    "/dev/shm": ("out_of_shared_memory", _OF_HOST),
}
"""By what runs out, the task, and what is right to say of it."""
_NO_TRITON = "triton is not installed"


def _out_of_memory(place: Place) -> Found:
    """What each kind of memory that runs out is called, and whether the next trial runs."""
    limit = 1024 * MIB
    figures = {}
    for name, (source, _) in _RUNS_OUT.items():
        found = place.trial(task(source), limit=limit)
        figures[name] = _OF_HOST if getattr(found, "message", "").startswith(_OF_HOST) else found.kind
    figures["a handle on a full card"] = place.alone(fails_on_a_full_card, compiles=False)
    has_triton = importlib.util.find_spec("triton") is not None
    figures["a Triton kernel on one"] = place.alone(fails_on_a_full_card, compiles=True) if has_triton else _NO_TRITON
    figures["halving"] = place.alone(halved)
    figures["the next trial"] = place.trial(place.varying, limit=limit).kind
    right = {name: kind for name, (_, kind) in _RUNS_OUT.items()}
    right |= {"a handle on a full card": "out of memory", "halving": "halved", "the next trial": "measured"}
    right["a Triton kernel on one"] = "out of memory" if has_triton else _NO_TRITON
    wrong = [f"{name}: {kind}" for name, kind in figures.items() if kind != right[name]]
    told = "each is named rightly" + ("" if has_triton else f" ({_NO_TRITON})")
    return Found("; ".join(wrong) or told, not wrong, figures)


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


def fails_on_a_full_card(compiles: bool) -> str:
    """The first matrix product where no memory is left for cuBLAS, or the first Triton kernel: what it raises, as this
    package calls it."""
    import torch

    from autotune.training.out_of_memory import is_out_of_memory

    held = []
    for size in (256 * MIB, 2 * MIB):
        try:
            while True:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            continue
    numbers = held[-1][: 4 * 4096].view(torch.float32).view(64, 64)
    del held[-2]  # room for a result
    try:
        if compiles:
            torch.compile(lambda x: x.sin() + 1)(numbers)
        else:
            torch.nn.functional.linear(numbers, numbers)
    except Exception as error:  # noqa: BLE001 - what it raises is what is looked at
        return "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"[:200]
    finally:
        held.clear()
    return "out of memory"  # the library had its memory already: nothing could fail


def _busy(place: Place) -> Found:
    """A trial beside a process that holds most of the card, and beside one that computes on it."""
    needs = place.measured(place.language).peak.process
    with place.process(hold) as holding:
        holding(share=0.98, computes=False)
        limit = None if needs < 64 * MIB else max(needs, used_bytes())
        held = place.once(place.request(place.language, limit=limit))
        holding(share=0.05, computes=True)
        beside = place.trial(place.varying, trial_time_s=1.0 if place.is_quick else 5.0)
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
    later = place.trial(place.varying)
    is_within = seconds < _BACK_S and isinstance(later, Measured) and outcome.kind == "crashed"
    return Found(f"{outcome.kind}; memory is back after {seconds:.1f} s; then: {later.kind}", is_within)


CHECKS = (
    Check("budget", "no trial above its budget; one that fits at 97 % of it is found to fit", _budget),
    Check("the job keeps it", "within the budget, and at most 3 % above the plan's peak", _job),
    Check("kinds of out of memory", "each is named rightly, and the search goes on", _out_of_memory),
    Check("busy card", f"not blamed on the configuration; work beside it disturbs more than {_DISTURBED:.0%}", _busy),
    Check("killed trial", f"memory is back within {_BACK_S:.0f} s, and the next trial runs", _killed),
)
