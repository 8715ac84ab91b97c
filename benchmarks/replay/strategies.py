"""Competitors that follow the strategies of existing autotuners, read from their sources and carried over to a table.

Each learns of a trial whether it fitted and how fast it was, as its original does. What they have as parallelism stages
is here the choice that frees memory: checkpointing, from the least freed to the most.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Generator, Iterator, Mapping
from functools import partial

from autotune.techniques import Settings
from autotune.techniques.checkpointing import Checkpointing

from .problem import Problem, Result, micro_batch

__all__ = ["deepspeed", "grid", "lightning", "paddle"]

Play = Generator[Settings, Result, str | None]

_PLATEAU = 0.05
"""DeepSpeed's ``METRIC_PERCENT_DIFF_CONST``: a larger micro-batch that gains less ends the doubling."""
_NUM_BATCHES = 3
"""DeepSpeed's ``num_tuning_micro_batch_sizes``."""
_EARLY_STOP, _MOST_TRIALS = 5, 50
"""DeepSpeed's ``tuner_early_stopping`` and ``tuner_num_trials``."""


def grid(problem: Problem, seed: int) -> Play:
    """Everything, by nested loops in an order that is the seed's."""
    names = random.Random(seed).sample(list(problem.choices), len(problem.choices))
    yield from _product(problem, problem.settings[0], names)
    return None


def paddle(problem: Problem, seed: int) -> Play:
    """The grid, largest micro-batches first, less what the history rules out, all else being equal: a larger
    micro-batch than one that ran out of memory, a smaller one than one that ran; no recomputation where memory ran out
    with it, recomputation where it ran without.

    Source: PaddlePaddle, python/paddle/distributed/auto_tuner/prune.py, ``prune_by_mbs_history`` and
    ``prune_by_recompute_history``; utils.py, ``default_candidates`` (descending micro-batches).
    """
    rest = [name for name in problem.choices if name not in ("batch", "checkpointing")]
    names = [*random.Random(seed).sample(rest, len(rest)), "checkpointing", "batch"]
    history: list[Result] = []
    num_blocks = _num_blocks(problem)
    for settings in _product(problem, problem.settings[0], [name for name in names if name in problem.choices], -1):
        if not any(_rules_out(known, settings, num_blocks) for known in history):
            history.append((yield settings))
    return None


def deepspeed(problem: Problem, seed: int) -> Play:
    """Stage by stage, from the one that frees the least memory: the micro-batch doubles until it does not fit or gains
    less than 5 %, and is refined between the last two; then everything else is tuned over the best micro-batches, by a
    grid that stops early. A stage that takes no larger batch than one before, or is not faster, ends at once.

    Source: DeepSpeed, deepspeed/autotuning/autotuner.py, ``tune``, ``tune_space``, ``get_min_max_micro_batch_size``,
    ``run_tuning_micro_batch_sizes``; tuner/base_tuner.py, ``tune``.
    """
    seen: dict[Settings, Result] = {}
    largest, fastest = 0, float("-inf")
    stages = problem.choices.get("checkpointing", [problem.settings[0].checkpointing])
    for stage in sorted(stages, key=partial(_freed, num_blocks=_num_blocks(problem))):
        combination = _defaults(problem).model_copy(update={"checkpointing": stage})
        yield from _double(problem, combination, seen, _PLATEAU)
        fits = [each for each in problem.ladders.get(combination, []) if _fits(seen.get(each))]
        if not fits or micro_batch(fits[-1]) < largest or _fastest({each: seen[each] for each in fits}) < fastest:
            continue
        largest, fastest = micro_batch(fits[-1]), _fastest({each: seen[each] for each in fits})
        batches = sorted(fits, key=lambda each: -(seen[each].verdict.log_speed or 0.0))[:_NUM_BATCHES]
        yield from _tune(problem, batches, seen)
    return "all stages are tuned"


def lightning(problem: Problem, seed: int) -> Play:
    """The batch doubles at the user's own settings until it does not fit; then mixed precision, as a user turns it on
    by hand, and the batch again.

    Source: Lightning, src/lightning/pytorch/tuner/batch_size_scaling.py, ``_run_power_scaling``.
    """
    seen: dict[Settings, Result] = {}
    combination = _defaults(problem)
    yield from _double(problem, combination, seen, None)
    for choice in problem.choices.get("precision", []):
        if choice.kind == "bf16":
            yield from _double(problem, combination.model_copy(update={"precision": choice}), seen, None)
    return "the batch is scaled"


def _double(problem: Problem, combination: Settings, seen: dict[Settings, Result], plateau: float | None) -> Play:
    """A combination's micro-batches from the smallest up, each at least twice the last, until one does not fit or, with
    a ``plateau``, gains less than that; with one, refined by bisection between the last two."""
    ladder = problem.ladders.get(combination, [])
    last, speed = -1, float("-inf")
    for at, settings in enumerate(ladder):
        if last >= 0 and micro_batch(settings) < 2 * micro_batch(ladder[last]):
            continue
        seen[settings] = yield settings
        if not _fits(seen[settings]):
            break
        last, before, speed = at, speed, seen[settings].verdict.log_speed or 0.0
        if plateau is not None and speed - before < plateau:
            return None
    else:
        return None
    while plateau is not None and at - last > 1:
        middle = (last + at) // 2
        seen[ladder[middle]] = yield ladder[middle]
        last, at = (middle, at) if _fits(seen[ladder[middle]]) else (last, middle)
    return None


def _tune(problem: Problem, batches: list[Settings], seen: dict[Settings, Result]) -> Play:
    """A grid over everything but the stage and these batches, until there was no gain for some trials."""
    names = [name for name in problem.choices if name not in ("batch", "checkpointing")]
    best, since = float("-inf"), 0
    grids = itertools.chain.from_iterable(zip(*(_product(problem, each, names) for each in batches), strict=False))
    for settings in itertools.islice(grids, _MOST_TRIALS):
        if settings not in seen:
            seen[settings] = yield settings
        speed = _fastest({settings: seen[settings]})
        best, since = (speed, 0) if speed > best else (best, since + 1)
        if since >= _EARLY_STOP:
            break
    return None


def _product(problem: Problem, base: Settings, names: list[str], batches: int = 1) -> Iterator[Settings]:
    """Configurations of the table that differ from ``base`` in ``names`` at most, the last name changing fastest."""
    rows = [problem.choices[name][:: batches if name == "batch" else 1] for name in names]
    for chosen in itertools.product(*rows):
        settings = base.model_copy(update=dict(zip(names, chosen, strict=True)))
        if problem.is_known(settings):
            yield settings


def _defaults(problem: Problem) -> Settings:
    """The combination with the fewest choices of its own."""
    return min(problem.ladders, key=lambda each: len(each.model_dump(exclude_defaults=True)))


def _freed(stage: Checkpointing, num_blocks: int) -> float:
    """How much a choice of checkpointing frees, for the order: nothing, some blocks, every block."""
    if stage.kind == "chosen":
        return len(stage.blocks) / num_blocks
    return 0.0 if stage.kind == "none" else 1 / stage.every


def _num_blocks(problem: Problem) -> int:
    """That the table's choices of blocks tell of."""
    return 1 + max((number for each in problem.settings for number in each.checkpointing.blocks), default=0)


def _fits(result: Result | None) -> bool:
    return result is not None and result.verdict.feasible


def _fastest(seen: Mapping[Settings, Result]) -> float:
    speeds = [row.verdict.log_speed for row in seen.values() if _fits(row) and row.verdict.log_speed is not None]
    return max(speeds, default=float("-inf"))


def _rules_out(known: Result, settings: Settings, num_blocks: int) -> bool:
    """Whether a trial makes a configuration needless, that is equal but for the batch, or but for recomputation."""
    done = known.settings
    larger = micro_batch(settings) - micro_batch(done)
    if larger and done.model_copy(update={"batch": settings.batch}) == settings:
        return larger > 0 if known.verdict.over_memory else larger < 0
    freed = _freed(settings.checkpointing, num_blocks) - _freed(done.checkpointing, num_blocks)
    if freed and done.model_copy(update={"checkpointing": settings.checkpointing}) == settings:
        return freed < 0 if known.verdict.over_memory else freed > 0
    return False
