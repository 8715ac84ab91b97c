"""What a recorded training was, and whether one with a plan was the same."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_FIRST = 10
"""Steps whose losses are held against each other one by one: later ones drift apart by rounding."""
_NUM_PARTS = 10
_WARM_UP = 50
"""Steps before the timed ones, or a tenth of all."""

Record = Mapping[str, Any]


def summary(record: Record) -> dict[str, Any]:
    """A training in figures: steps per second after the warm-up, peak, and the mean loss of each tenth of the steps."""
    steps = record["steps"]
    first, last = steps[min(_WARM_UP, len(steps) // 10)], steps[-1]
    num_timed, elapsed_s = len(steps) - 1 - steps.index(first), last["ended_s"] - first["ended_s"]
    return {
        "steps": len(steps),
        "steps_per_s": round(num_timed / elapsed_s, 3),
        "cpu_share": round((last["cpu_s"] - first["cpu_s"]) / elapsed_s, 3),
        "peak_bytes": record["peak_bytes"],
        "losses": [round(statistics.mean(part), 5) for part in _parts(_losses(record))],
    }


def compared(plain: Record, planned: Record, num_passes: int | None) -> dict[str, Any]:
    """How a training with a plan differs from the script's own.

    Args:
        plain: as the recorder wrote it.
        planned: the same of the script with the plan.
        num_passes: backward passes of an optimizer step by the plan; None, as many as the script's own.

    Returns:
        ``samples``, in words; ``faults``: what is not as it should be, one line each; ``first_losses``: the largest
        difference of the first steps' losses, as a share; ``all_losses``: of the mean of all.
    """
    samples, faults = _samples(plain, planned), list(_differing(plain, planned, num_passes))
    own, got = _losses(plain), _losses(planned)
    apart = [abs(b - a) / max(abs(a), 1e-9) for a, b in zip(own[:_FIRST], got[:_FIRST], strict=False)]
    return {
        "samples": samples,
        "faults": [*faults, *([f"samples: {samples}"] if samples.startswith("DIFFERENT") else [])],
        "first_losses": max(apart, default=0.0),
        "all_losses": statistics.mean(got) / statistics.mean(own) - 1,
    }


def _differing(plain: Record, planned: Record, num_passes: int | None) -> Iterator[str]:
    """Of the optimizers, their rates and the backward passes of each step."""
    for what, of in (("optimizer", _optimizer), ("learning rates", _rates), ("backward passes", _num_passes)):
        for place, (own, got) in enumerate(zip(plain["steps"], planned["steps"], strict=False), 1):
            expected = num_passes if num_passes is not None and of is _num_passes else of(own)
            if of(got) != expected:
                yield f"{what}: at step {place} {of(got)} in place of {expected}"
                break


def _optimizer(step: Record) -> str:
    return f"{step['class']} {step['optimizer']}"


def _rates(step: Record) -> list[float]:
    rates: list[float] = step["rates"]
    return rates


def _num_passes(step: Record) -> int:
    return len(step["losses"])


def _losses(record: Record) -> list[float]:
    """Of each step, the sum over its backward passes."""
    return [sum(loss or 0.0 for loss in step["losses"]) for step in record["steps"]]


def _parts(losses: Sequence[float]) -> Iterator[Sequence[float]]:
    size = max(1, len(losses) // _NUM_PARTS)
    for start in range(0, size * min(_NUM_PARTS, len(losses)), size):
        yield losses[start : start + size]


def _samples(plain: Record, planned: Record) -> str:
    """Each loader's epochs, in order, as far as both went: the last one ends with the training."""
    if not plain["epochs"]:
        return "no loader"
    loaders = [epoch["loader"] for epoch in plain["epochs"]], [epoch["loader"] for epoch in planned["epochs"]]
    if loaders[0] != loaders[1]:
        return f"DIFFERENT: loaders {loaders[1]} in place of {loaders[0]}"
    drawn_otherwise, num_samples = 0, 0
    for number, (own, got) in enumerate(zip(plain["epochs"], planned["epochs"], strict=True)):
        hashes, others = dict(own["batches"]), dict(got["batches"])
        common = sorted(hashes.keys() & others.keys())
        num_samples += common[-1] if common else 0
        apart = next((size for size in common if hashes[size] != others[size]), None)
        if apart is None:
            continue
        num_both = min(len(own["indices"]), len(got["indices"]))
        if None in own["indices"] or own["indices"][:num_both] != got["indices"][:num_both]:
            return f"DIFFERENT: in epoch {number}, of loader {own['loader']}, within the first {apart}"
        drawn_otherwise += 1
    if drawn_otherwise:
        return f"same order, drawn otherwise in {drawn_otherwise} of {len(plain['epochs'])} epochs"
    return f"same {num_samples:,}"
