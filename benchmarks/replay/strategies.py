"""Competitors that are the strategies of existing autotuners, as their sources have them, over a table.

Each is told only whether a trial fitted and how fast it was, as its original is.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from autotune.techniques import Settings

from .problem import Problem, Result, micro_batch

__all__ = ["deepspeed", "grid", "lightning", "paddle"]

Play = Generator[Settings, Result, str | None]

_STAGES = ("checkpointing", "layers", "precision", "memory_format", "optimizer", "data_loading", "allocator")
"""In the order of what frees the most memory, as DeepSpeed's ZeRO stages are."""
_EARLY_STOP = 5
"""Trials in a row without a gain after which a stage of DeepSpeed's ends: ``DEFAULT_TUNER_EARLY_STOPPING``."""


def grid(problem: Problem, seed: int) -> Play:
    """Everything, in the order of nested loops whose nesting is a seed's."""
    for settings in _product(problem, random.Random(seed)):
        yield settings
    return None


def paddle(problem: Problem, seed: int) -> Play:
    """The grid, less what the history rules out: a larger micro-batch than one that did not fit, all else equal; and a
    combination whose smaller memory use already did not fit.

    Source: PaddlePaddle, python/paddle/distributed/auto_tuner/prune.py (``prune_by_mbs_history``,
    ``prune_by_recompute_history``): an out-of-memory micro-batch prunes larger ones, and an out-of-memory with
    recomputation prunes the same without.
    """
    over: list[Settings] = []
    for settings in _product(problem, random.Random(seed)):
        if any(_needs_more(settings, known) for known in over):
            continue
        result = yield settings
        if result.verdict.over_memory:
            over.append(settings)
    return None


def deepspeed(problem: Problem, seed: int) -> Play:
    """Stage by stage: for each choice of a stage, the micro-batch doubles until it does not fit or is not faster; the
    best choice is kept for the next stage. Then batches between the last two are tried.

    Source: DeepSpeed, deepspeed/autotuning/autotuner.py (``tune``, ``tune_space``, ``run_tuning_micro_batch_sizes``,
    ``get_min_max_micro_batch_size``, and the early stop of ``DEFAULT_TUNER_EARLY_STOPPING``).
    """
    seen: dict[Settings, Result] = {}
    current, generator = _defaults(problem), random.Random(seed)
    for stage in [name for name in _STAGES if name in problem.choices]:
        tried: list[Settings] = []
        for choice in problem.choices[stage]:
            combination = current.model_copy(update={stage: choice})
            tried.append(combination)
            yield from _double(problem, combination, seen)
        current = max(tried, key=lambda each: _best_speed(problem, each, seen))
    rest = [each for each in problem.settings if each not in seen]
    generator.shuffle(rest)
    without_gain, best = 0, _fastest(seen)
    for settings in rest:  # the tuner over what is left: random is DeepSpeed's fallback from its model-based one
        seen[settings] = yield settings
        without_gain = 0 if _fastest(seen) > best else without_gain + 1
        best = max(best, _fastest(seen))
        if without_gain >= _EARLY_STOP:
            return "no gain"
    return None


def lightning(problem: Problem, seed: int) -> Play:
    """The batch scaled by powers of two until it does not fit, at the user's own settings; then mixed precision, as a
    user would try it by hand, and the batch scaled again.

    Source: Lightning, lightning/pytorch/tuner/batch_size_scaling.py (``_run_power_scaling``).
    """
    seen: dict[Settings, Result] = {}
    combination = _defaults(problem)
    yield from _double(problem, combination, seen, until_over=True)
    for choice in problem.choices.get("precision", []):
        if choice.kind == "bf16":
            faster = combination.model_copy(update={"precision": choice})
            yield from _double(problem, faster, seen, until_over=True)
    return "scaled"


def _double(problem: Problem, combination: Settings, seen: dict[Settings, Result], until_over: bool = False) -> Play:
    """Micro-batches of a combination from the smallest up, each at least twice the last."""
    last, speed = 0, float("-inf")
    for settings in problem.ladders.get(combination, []):
        if micro_batch(settings) < 2 * last:
            continue
        last = micro_batch(settings)
        if settings not in seen:
            seen[settings] = yield settings
        verdict = seen[settings].verdict
        if verdict.over_memory or (not until_over and (verdict.log_speed or speed) < speed):
            return None
        speed = verdict.log_speed or speed
    return None


def _defaults(problem: Problem) -> Settings:
    """The combination with the fewest choices of its own."""
    return min(problem.ladders, key=lambda each: len(each.model_dump(exclude_defaults=True)))


def _best_speed(problem: Problem, combination: Settings, seen: Mapping[Settings, Result]) -> float:
    return _fastest({each: seen[each] for each in problem.ladders.get(combination, []) if each in seen})


def _fastest(seen: Mapping[Settings, Result]) -> float:
    speeds = [row.verdict.log_speed for row in seen.values() if row.verdict.feasible and row.verdict.log_speed is not None]
    return max(speeds, default=float("-inf"))


def _product(problem: Problem, generator: random.Random) -> Iterator[Settings]:
    """Every configuration of the table, the last of a random order of the techniques changing fastest."""
    names = generator.sample(list(problem.choices), len(problem.choices))
    known = {each.canonical(): each for each in problem.settings}
    for chosen in itertools.product(*(problem.choices[name] for name in names)):
        changes: dict[str, Any] = dict(zip(names, chosen, strict=True))
        settings = problem.settings[0].model_copy(update=changes)
        if settings.canonical() in known:
            yield known[settings.canonical()]


def _needs_more(settings: Settings, known: Settings) -> bool:
    """Whether it needs at least the memory of one that did not fit: a larger batch, or no recomputation, else equal."""
    larger = micro_batch(settings) >= micro_batch(known)
    kept = settings.checkpointing == known.checkpointing or settings.checkpointing.kind == "none"
    same = known.model_copy(update={"batch": settings.batch, "checkpointing": settings.checkpointing}) == settings
    return larger and kept and same
