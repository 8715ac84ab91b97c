"""How long a search likely takes: the runs that are left, times what one of each kind takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..techniques import Facts
from .options import SamplerName, SearchOptions
from .time_budget import NUM_FINALISTS, NUM_REPEATS

__all__ = ["FRESH_EXTRA_S", "Costs", "Expected", "Runs", "expected", "likely_s", "likely_trials"]

_LIKELY_TRIALS = 11
"""Where the sampler ``law`` stops by itself: in replays (docs/search.md). It took 4 to 15, the median 9, in searches of
two examples (benchmarks/results/search-time-cpu.jsonl)."""
_AT_LEAST_MORE = 2
"""Trials that are still expected of it where it has gone on for longer."""
FRESH_EXTRA_S = 3.0
"""What a fresh interpreter adds to a run (importing torch), before one was seen."""
_QUICK_PREDICTION, _SLOW_PREDICTION = 1.0, 3.0
"""What predictions take before the first trial, over the inspection: both trace the model. 5 to 13 s after 4 s in two
examples."""
_FEW_WINDOWS, _MANY_WINDOWS = 10, 40
"""Timed windows until a speed is known to 2 %, on a quiet machine and on a busy one."""
_SHORTEST_WINDOW_S = 0.05
_WARM_UP_STEPS, _COMPARED_STEPS = 5, 10
"""Steps of a trial outside its timed windows, until it has settled, and to compare its losses."""
_STEP_OVER_TWO_PASSES = 1.3
"""An optimizer step over its forward and backward alone."""
_UNKNOWN_STEP_S = 0.2
_GAINED = 2.0
"""How many times as fast as the reference what is tried is, at best; at worst, how many times as slow."""


@dataclass(frozen=True)
class Runs:
    """Runs that are left."""

    trials: int
    compared: int = 0
    """Finalists' first round: they run as trials do."""
    fresh: int = 0
    """In fresh interpreters, the reference's included."""


@dataclass(frozen=True)
class Costs:
    """What one run takes, seconds from its start to its end."""

    trial_s: float
    again_s: float
    """The same once more, where losses are not compared again."""
    fresh_s: float
    """In a fresh interpreter."""


def likely_s(runs: Runs, costs: Costs, num_slots: int = 1) -> float:
    """How long runs take: trials in all slots, the finalists one after the other."""
    return runs.trials / num_slots * costs.trial_s + runs.compared * costs.again_s + runs.fresh * costs.fresh_s


def likely_trials(most: int, sampler: SamplerName, num_done: int = 0) -> int:
    """How many more trials a search likely takes, of at most ``most`` in all: the sampler ``law`` stops by itself."""
    likely = max(_LIKELY_TRIALS - num_done, _AT_LEAST_MORE) if sampler == "law" else most
    return max(min(likely, most - num_done), 0)


@dataclass(frozen=True)
class Expected:
    """How long a search takes that has not begun, seconds, finalists included."""

    low_s: float
    high_s: float
    """It likely takes from ``low_s`` to this."""
    most_s: float
    """It hardly takes longer: all trials, each for all of its time."""


def expected(facts: Facts, inspect_s: float, options: SearchOptions, num_trials: int) -> Expected:
    """How long a search likely takes, from what the inspection measured.

    Args:
        facts: of the inspection, with the speed of a step.
        inspect_s: what it took: the task is loaded, the model and the dataset are built, a few steps run.
        options: how long a trial and the search may take.
        num_trials: configurations to measure at most.
    """
    rate = facts.step_samples_per_s
    step_s = _STEP_OVER_TWO_PASSES * facts.effective_batch / rate if rate else _UNKNOWN_STEP_S
    setup_s = max(0.0, inspect_s - 3 * step_s) / 2  # loaders are timed there, too

    def whole_s(num: int, num_windows: float, speedup: float, prediction: float) -> float:
        timed_s = min(options.trial_time_s, num_windows * max(_SHORTEST_WINDOW_S, step_s / speedup))
        again_s = setup_s + _WARM_UP_STEPS * step_s / speedup + timed_s
        costs = Costs(again_s + _COMPARED_STEPS * step_s / speedup, again_s, again_s + FRESH_EXTRA_S)
        predicted_s = prediction * inspect_s if options.sampler == "law" else 0.0
        found = inspect_s + predicted_s + likely_s(_whole_search(num), costs)
        return found if options.max_time_s is None else min(found, options.max_time_s)

    likely = likely_trials(num_trials, options.sampler)
    return Expected(
        low_s=whole_s(likely, _FEW_WINDOWS, _GAINED, _QUICK_PREDICTION),
        high_s=whole_s(likely, _MANY_WINDOWS, 1.0, _SLOW_PREDICTION),
        most_s=whole_s(num_trials, math.inf, 1 / _GAINED, _SLOW_PREDICTION),
    )


def _whole_search(num_trials: int) -> Runs:
    """So many trials, and the finalists after them."""
    others = num_trials - 1
    compared = min(NUM_FINALISTS, others) if others > 1 else 0
    return Runs(num_trials, compared, NUM_REPEATS * min(num_trials, 2))
