"""Expected duration of a search: the runs that are left, times the duration of one of each kind."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...techniques import Facts
from ..options import SamplerName, SearchOptions
from ..time_budget import FRESH_EXTRA_S, NUM_FINALISTS, NUM_REPEATS
from ..winner.by_turns import NUM_ROUNDS_BY_TURNS, turn_s

_LIKELY_TRIALS = 11
"""Trials after which the sampler ``gain`` usually stops, by replays (docs/inside/search.md). Searches of two examples
took 4 to 15, the median 9 (benchmarks/results/search-time-cpu.jsonl)."""
_AT_LEAST_MORE = 2
"""Trials that are still expected when ``gain`` has run for longer than that."""
_QUICK_PREDICTION, _SLOW_PREDICTION = 1.0, 3.0
"""Duration of the predictions before the first trial over the inspection's: both trace the model. 5 to 13 s after 4 s
in two examples."""
_LIKELY_TURNS = 8
"""Turns of either side in a round, of 5 to 11, the first included, which is the warm-up."""
_BOTH_STARTS = 1.5
"""Duration of a round's two starts, at once on the same processors, over that of one alone."""
_FEW_WINDOWS, _MANY_WINDOWS = 10, 40
"""Timed windows until a speed is known to 2 %, on a quiet and on a busy machine."""
_SHORTEST_WINDOW_S = 0.05
_WARM_UP_STEPS, _COMPARED_STEPS = 5, 10
"""Steps of a trial outside its timed windows: until it has settled, and for comparing losses."""
_STEP_OVER_TWO_PASSES = 1.3
"""Duration of an optimizer step over that of forward and backward alone."""
_UNKNOWN_STEP_S = 0.2
_GAINED = 2.0
"""Speed of configurations over the reference's, at best; at worst, the inverse."""


@dataclass(frozen=True)
class Runs:
    """Runs that are left."""

    trials: int
    compared: int = 0
    """Runs of the finalists' first round, which are like trials."""
    fresh: int = 0
    """Runs in fresh interpreters, the reference's included."""
    rounds: int = 0
    """Rounds in which the best and the reference take turns, in place of runs in fresh interpreters."""


@dataclass(frozen=True)
class Costs:
    """What one run takes, seconds from its start to its end."""

    trial_s: float
    again_s: float
    """A run in which losses are not compared again."""
    fresh_s: float
    """A run in a fresh interpreter."""
    round_s: float
    """A round by turns: both start, and then take turns."""

    @classmethod
    def of(cls, trial_s: float, again_s: float, timed_s: float, trial_time_s: float) -> Costs:
        """Where nothing has run in a fresh interpreter yet.

        Args:
            trial_s: of a trial.
            again_s: of one in which losses are not compared again.
            timed_s: the timed windows' part of either.
            trial_time_s: ``--trial-time``.
        """
        fresh_s = again_s + FRESH_EXTRA_S
        round_s = _BOTH_STARTS * max(fresh_s - timed_s, 0.0) + 2 * _LIKELY_TURNS * turn_s(trial_time_s)
        return cls(trial_s, again_s, fresh_s, round_s)


def likely_s(runs: Runs, costs: Costs, num_slots: int = 1) -> float:
    """Expected seconds of these runs: trials in all slots at once, finalists one after the other."""
    finalists_s = runs.compared * costs.again_s + runs.fresh * costs.fresh_s + runs.rounds * costs.round_s
    return runs.trials / num_slots * costs.trial_s + finalists_s


def predictions_s(inspect_s: float, options: SearchOptions) -> float:
    """Expected seconds of the predictions before the first trial; scripts have none."""
    is_made = options.sampler == "gain" and options.command is None
    return (_QUICK_PREDICTION + _SLOW_PREDICTION) / 2 * inspect_s if is_made else 0.0


def likely_trials(most: int, sampler: SamplerName, num_done: int = 0) -> int:
    """Expected number of further trials, of at most ``most`` in all: the sampler ``gain`` stops by itself."""
    likely = max(_LIKELY_TRIALS - num_done, _AT_LEAST_MORE) if sampler == "gain" else most
    return max(min(likely, most - num_done), 0)


@dataclass(frozen=True)
class Expected:
    """Duration of a search that has not begun, seconds, finalists included."""

    low_s: float
    high_s: float
    """Upper end of the likely range; ``low_s`` is the lower."""
    most_s: float
    """Upper bound: all trials, each with all of its time."""


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
        timed_s = min(options.trial_time, num_windows * max(_SHORTEST_WINDOW_S, step_s / speedup))
        again_s = setup_s + _WARM_UP_STEPS * step_s / speedup + timed_s
        trial_s = again_s + _COMPARED_STEPS * step_s / speedup
        costs = Costs.of(trial_s, again_s, timed_s, options.trial_time)
        predicted_s = prediction * inspect_s if options.sampler == "gain" else 0.0
        found = inspect_s + predicted_s + likely_s(_whole_search(num, facts.ranks == 1), costs)
        return found if options.max_time is None else min(found, options.max_time)

    likely = likely_trials(num_trials, options.sampler)
    return Expected(
        low_s=whole_s(likely, _FEW_WINDOWS, _GAINED, _QUICK_PREDICTION),
        high_s=whole_s(likely, _MANY_WINDOWS, 1.0, _SLOW_PREDICTION),
        most_s=whole_s(num_trials, math.inf, 1 / _GAINED, _SLOW_PREDICTION),
    )


def _whole_search(num_trials: int, by_turns: bool) -> Runs:
    """So many trials and the finalists after them."""
    others = num_trials - 1
    compared = min(NUM_FINALISTS, others) if others > 1 else 0
    if by_turns and others:
        return Runs(num_trials, compared, rounds=NUM_ROUNDS_BY_TURNS)
    return Runs(num_trials, compared, NUM_REPEATS * min(num_trials, 2))
