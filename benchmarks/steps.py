"""A step forward and backward with stock layers, the peer's and ours: what is kept, the true dynamic peak, the time.

Kept are the storages that backward needs, each once, without parameters and buffers. The peak is the largest running
sum of allocations and frees, by torch's profiler. Steps of the three take turns.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autotune.layers import convert
from tests.kept_bytes import kept_bytes

from .peer import converted_by_peer

KINDS: dict[str, dict[str, bool]] = {"exact": {}, "rounding": {"rounding": True}, "recompute": {"recompute": True}}
"""Of the technique ``layers``: what ``convert`` is told."""
_RUN = "benchmarks.steps: run"


@dataclass(frozen=True)
class Step:
    """A model's forward and backward, with the same random numbers each time."""

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]

    def __call__(self) -> None:
        torch.manual_seed(1)
        self.loss(self.model).backward()  # type: ignore[no-untyped-call]
        self.model.zero_grad()

    def kept_bytes(self) -> int:
        found, loss = kept_bytes(lambda: self.loss(self.model), self.model)
        loss.backward()  # type: ignore[no-untyped-call]  # a node that saved its own output holds itself until then
        self.model.zero_grad()
        return found

    def peak_bytes(self) -> int:
        """The largest running sum of what a step allocates and frees."""
        self()
        return dynamic_peak_bytes(self)


def dynamic_peak_bytes(run: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> int:
    """The largest running sum of what a run allocates and frees on the CPU, by torch's profiler.

    Args:
        run: what has the peak.
        prepare: what goes before: what it leaves allocated counts, a peak of its own does not.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        prepare()
        with record_function(_RUN):
            run()
    assert profiler.profiler is not None, "the block above has run"
    assert profiler.profiler.kineto_results is not None, "the block above has run"
    events = [*profiler.profiler.kineto_results.events()]
    begun_ns = next(event.start_ns() for event in events if event.name() == _RUN)
    allocations = (event for event in events if event.name() == "[memory]")
    total = largest = 0
    for event in sorted(allocations, key=lambda event: event.start_ns()):
        total += event.nbytes()
        largest = max(largest, total) if event.start_ns() >= begun_ns else total
    return largest


def compare(model: nn.Module, loss: Callable[[nn.Module], Tensor], rounds: int, kind: str) -> dict[str, Any]:
    """What belongs into a row: figures of ``stock``, ``ours`` and, where it runs, ``peer``; ratios are to stock's.

    Where the peer raises, ``peer_error`` has the error's class and first line.
    """
    peer, error = _peer_step(model, loss)
    steps = {
        "stock": Step(model, loss),
        **peer,
        "ours": Step(convert(copy.deepcopy(model), loss, **KINDS[kind]), loss),
    }
    kept = {key: step.kept_bytes() for key, step in steps.items()}
    peaks = {key: step.peak_bytes() for key, step in steps.items()}
    seconds = take_turns(steps, rounds)
    ratios = {key: ratios_of(taken, seconds["stock"]) for key, taken in seconds.items() if key != "stock"}
    return {
        "kind": kind,
        "peer_error": error,
        "kept_bytes": kept,
        "kept_ratio": _of_stock(kept),
        "peak_bytes": peaks,
        "peak_ratio": _of_stock(peaks),
        "seconds": seconds,
        "time_ratio": {key: statistics.median(found) for key, found in ratios.items()},
        "time_spread": {key: [min(found), max(found)] for key, found in ratios.items()},
    }


def _peer_step(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> tuple[dict[str, Step], str | None]:
    try:
        converted = converted_by_peer(model)
        if converted is None:
            return {}, None
        step = Step(converted, loss)
        step()
    except Exception as error:  # noqa: BLE001 - whatever the peer raises is its result
        return {}, f"{type(error).__name__}: {error}".splitlines()[0]
    return {"peer": step}, None


def take_turns(
    steps: Mapping[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each step by a clock, in rounds of all of them."""
    seconds: dict[str, list[float]] = {key: [] for key in steps}
    order, shuffler = list(steps), random.Random(0)
    for _ in range(rounds):
        shuffler.shuffle(order)  # what ran before leaves its mark on caches and on malloc's
        for key in order:
            began_s = clock()
            steps[key]()
            seconds[key].append(clock() - began_s)
    return seconds


def ratios_of(taken: list[float], stock: list[float]) -> list[float]:
    """By round."""
    return [one / other for one, other in zip(taken, stock, strict=True)]


def _of_stock(found: dict[str, int]) -> dict[str, float]:
    return {key: value / max(found["stock"], 1) for key, value in found.items() if key != "stock"}
