"""Speeds and waits as trials measure them, beside plain loops that wait for the card once."""

from __future__ import annotations

import itertools
import os
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from autotune.plan import Budget, Plan
from autotune.task_file import load_task
from autotune.techniques import Settings
from autotune.training.apply_plan import apply

from .check import Check, Found, off
from .place import Place, measurement, name_of, task
from .tasks import SHORT_STEP_S, STARVED_S

_FORK_BAR, _SPEED_BAR, _WAIT_BAR = 0.02, 0.05, 0.05
_TIMED = ("launch_bound", "short_steps", "long_steps", "sums")
_LOADING: dict[str, dict[str, Any]] = {
    "unpinned": {},
    "pinned": {"data_loading": {"num_workers": 0, "pin_memory": True}},
    "workers": {"data_loading": {"num_workers": 2, "pin_memory": True}},
    "on the card": {"data_loading": {"cache": "device"}},
}
_COLLATED = ("long_steps", "sums")
"""The host makes their batches, so that none can lie on the card already."""
_QUICK = {"launch_bound": "on the card", "short_steps": "pinned", "long_steps": "workers", "sums": "unpinned"}
_PINNED: dict[str, Any] = {"data_loading": {"num_workers": 0, "pin_memory": True}}
"""A copy from other host memory waits for the card by itself (torch 2.13, aten/src/ATen/native/cuda/Copy.cu)."""
_WAITS: dict[str, tuple[dict[str, Any], int]] = {
    "as it stands": ({}, 0),
    "bf16": ({"precision": {"kind": "bf16"}}, 0),
    "fp16": ({"precision": {"kind": "fp16"}}, 1),
    "checkpointing": ({"checkpointing": {"kind": "blocks"}}, 0),
    "layers": ({"layers": {"kind": "exact"}}, 0),
    "cached on the card": ({"data_loading": {"cache": "device"}}, 0),
}
"""By technique, the settings and how often a step may wait for the card."""


def _forked(place: Place) -> Found:
    """Trials that are forked beside trials in fresh interpreters, by turns."""
    figures: dict[str, Any] = {}
    for source in (place.language, place.images):
        asked = [place.request(source).model_copy(update={"fresh": is_fresh}) for is_fresh in (False, True)]
        num_rounds = 1 if place.is_quick else 3
        rounds = [[measurement(place.executor.ask(one)) for one in asked] for _ in range(num_rounds)]
        speeds, peaks = (
            [statistics.median(map(value, row)) for row in zip(*rounds, strict=True)]
            for value in (lambda one: one.samples_per_s.value, lambda one: one.peak.process)
        )
        figures[name_of(source)] = {"speed": off(*speeds), "peak": off(*peaks)}
    mapped = sum("/dev/nvidia" in _maps(pid) for pid in _own_children())
    worst = max(value for row in figures.values() for value in row.values())
    words = f"{worst:.1%} apart at most; {mapped} processes that trials are forked from have a card open"
    return Found(words, worst <= _FORK_BAR and not mapped, figures)


def _own_children() -> list[int]:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


def _maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def _speed(place: Place) -> Found:
    """Tasks whose step takes the card a known time: trials beside plain loops."""
    figures: dict[str, dict[str, float]] = {}
    seconds = 0.5 if place.is_quick else 2.0
    with place.process(plain_loop) as loop:
        for name, way in ways(place.is_quick):
            settings = _LOADING[way]
            found = place.measured(task(name), Settings.model_validate(settings), trial_time_s=seconds)
            true = loop(name=name, settings=settings, seconds=seconds)
            figures[f"{name}, {way}"] = {"off": off(found.samples_per_s.value, true)}
    worst = max(figures, key=lambda name: figures[name]["off"])
    return Found(f"{figures[worst]['off']:.1%} off at most ({worst})", figures[worst]["off"] <= _SPEED_BAR, figures)


def ways(is_quick: bool) -> list[tuple[str, str]]:
    """Tasks, and how they load."""
    if is_quick:
        return [*_QUICK.items()]
    every = itertools.product(_TIMED, _LOADING)
    return [(name, way) for name, way in every if way != "on the card" or name not in _COLLATED]


def plain_loop(name: str, settings: dict[str, Any], seconds: float) -> float:
    """Samples per second of a loop that waits for the card when it begins and when it ends."""
    plan = Plan(settings=Settings.model_validate(settings), budget=Budget(device="cuda"))
    training = apply(plan, load_task(task(name)))
    batches = itertools.chain.from_iterable(itertools.repeat(training.loader))
    for batch in itertools.islice(batches, 5):
        training.step(batch)
    torch.cuda.synchronize()
    num_samples, began_s = 0, time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        batch = next(batches)
        training.step(batch)
        num_samples += len(batch[0])
    torch.cuda.synchronize()
    taken_s = time.perf_counter() - began_s
    return num_samples / taken_s


def _loader_wait(place: Place) -> Found:
    """The time that the card is without data: loaders of 20 and 60 ms, beside steps that take it 120 and 20 ms."""
    seconds = 1.0 if place.is_quick else 4.0
    true = {"long_steps": 0.0, "starved": 1 - SHORT_STEP_S / STARVED_S}
    found = {name: place.measured(task(name), trial_time_s=seconds).loader_wait for name in true}
    apart = max(abs(found[name] - true[name]) for name in true)
    words = ", ".join(f"{found[name]:.1%} for {true[name]:.1%}" for name in true)
    return Found(words, apart <= _WAIT_BAR, {"found": found, "true": true})


def _waits(place: Place) -> Found:
    """Where a step makes the host wait for the card, by torch's own watch."""
    found = place.alone(waits)
    most = {name: number for name, (_, number) in _WAITS.items()}
    over = {name: sites for name, sites in found.items() if len(sites) > most[name]}
    words = "; ".join(f"{name}: {', '.join(sites)}" for name, sites in over.items()) or "none beyond fp16's one"
    return Found(words, not over, found)


def waits() -> dict[str, list[str]]:
    """By technique, the places in this package where a step waited."""
    from .tasks import words

    found = {}
    for name, (settings, _) in _WAITS.items():
        training = apply(
            Plan(settings=Settings.model_validate(_PINNED | settings), budget=Budget(device="cuda")), words()
        )
        batches = iter(training.loader)
        for _ in range(3):
            training.step(next(batches))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                training.step(next(batches))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        inside = [one for one in seen if "called a synchronizing" in str(one.message)]
        found[name] = [f"{'/'.join(Path(one.filename).parts[-3:])}:{one.lineno}" for one in inside]
    return found


CHECKS = (
    Check("fork against fresh", f"speed and peak within {_FORK_BAR:.0%}; no card open before a fork", _forked),
    Check("speed", f"within {_SPEED_BAR:.0%} of a loop that waits once, each", _speed),
    Check("loader_wait", f"within {100 * _WAIT_BAR:.0f} points", _loader_wait),
    Check("hidden waits", "none in a step; with fp16 one", _waits),
)
