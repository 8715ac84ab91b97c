"""One replay: a competitor against a table under a budget, trial by trial through the table-driven executor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.measure import Measurement, MeasureOptions
from autotune.plan import Plan
from autotune.searches.store.pace import UNCORRECTED, weighed
from autotune.searches.time_budget import NUM_FINALISTS
from autotune.searches.verdict import judge
from autotune.techniques import Settings
from autotune.workers import Measured, MeasureRequest, Outcome, OutOfMemory
from autotune.workers.table import Row, TableExecutor

from .load import Load, Loaded
from .problem import Competitor, Problem, Result
from .table import Table, Truth

_START_S = 2.0
"""Of a trial: starting, loading, applying."""
_LEAST_TIMED_S = 2.0
"""Timed windows, at least."""
_NUM_STEPS = 25
"""Optimizer steps of the parity run, the warm-up and the least timed windows."""


@dataclass(frozen=True)
class Replay:
    """What one replay came to."""

    regrets: tuple[float, ...]
    """After each trial: how much slower than the best the plan would be, were the search to end there."""
    over_budget: tuple[bool, ...]
    """Of each trial: more than the budget was used, or it ran out of memory."""
    in_margin: tuple[bool, ...]
    """Of each trial: within the budget, but less than the margin was left."""
    seconds: tuple[float, ...]
    """Of each trial."""
    stopped: str | None
    """Why the competitor stopped by itself before the trials were used up; None where it did not."""

    def regret_after(self, num_trials: int) -> float:
        """Of the plan at that moment, or at the end where it ended before; 1 where nothing was measured."""
        return self.regrets[min(num_trials, len(self.regrets)) - 1] if self.regrets else 1.0

    def as_row(self) -> dict[str, Any]:
        """As it is kept."""
        return {
            "regrets": [round(value, 4) for value in self.regrets],
            "over_budget": [number for number, over in enumerate(self.over_budget, 1) if over],
            "in_margin": [number for number, within in enumerate(self.in_margin, 1) if within],
            "seconds_of_12": round(sum(self.seconds[:12]), 1),
            "seconds": round(sum(self.seconds), 1),
            "stopped": self.stopped,
        }


def play(
    table: Table, budget: str, competitor: Competitor, seed: int, num_trials: int, load: Load | None = None
) -> Replay:
    """Let a competitor search a table.

    Args:
        table: what answers.
        budget: a name in ``BUDGETS``.
        competitor: what searches.
        seed: of the competitor, and of which repeat answers which trial.
        num_trials: at most.
        load: other work that begins meanwhile; the table's first configuration is the reference then.
    """
    truth = Truth(table, table.limit_bytes(budget))
    executor = table.executor(truth.limit_bytes, seed)
    predicted = {entry.settings.canonical(): entry.predicted for entry in table.entries}
    problem = Problem(table.name, predicted, tuple(entry.settings for entry in table.entries), truth.budget)
    results: list[Result] = []
    regrets: list[float] = []
    searching, stopped = competitor(problem, seed), None
    loaded = Loaded(load, seed, _reference(table)) if load is not None else None
    try:
        settings = next(searching)
        while True:
            if any(row.settings == settings for row in results):  # measured again: no trial
                settings = searching.send(_trial(executor, table, truth, settings))
                continue
            results.append(_trial(executor, table, truth, settings))
            if loaded is not None:
                results[-1] = _under(loaded, results[-1], len(results) - 1, truth)
            regrets.append(truth.regret(_settled(results, table, truth, seed)))
            if len(results) == num_trials:
                break
            settings = searching.send(results[-1])
    except StopIteration as end:
        stopped = end.value
    over = tuple(_is_over(row.outcome, truth.limit_bytes) for row in results)
    in_margin = tuple(row.verdict.over_memory and not above for row, above in zip(results, over, strict=True))
    return Replay(tuple(regrets), over, in_margin, tuple(row.outcome.seconds for row in results), stopped)


def _reference(table: Table) -> Measurement:
    """Of the first configuration that could be measured, the mean."""
    entry = table.measured[0]
    value = math.exp(entry.mean_log_speed)
    found = Row(settings=entry.settings, samples_per_s=(value,), peak_bytes=entry.peak_bytes[:1]).outcome_at(0)
    assert isinstance(found, Measured)
    return found.measurement


def _under(loaded: Loaded, result: Result, number: int, truth: Truth) -> Result:
    """A result under a load, with what is made of all so far."""
    outcome, found = result.outcome, None
    if isinstance(outcome, Measured):
        found = loaded.felt(outcome.measurement, number)
        outcome = outcome.model_copy(update={"measurement": found})
    corrections = loaded.corrections(number, found)
    return Result(result.settings, outcome, judge(outcome, truth.budget, 0), corrections)


def _is_over(outcome: Outcome, limit_bytes: int) -> bool:
    if isinstance(outcome, Measured):
        return outcome.measurement.peak.process > limit_bytes
    return isinstance(outcome, OutOfMemory)


def _trial(executor: TableExecutor, table: Table, truth: Truth, settings: Settings) -> Result:
    options = MeasureOptions(parity_batch=1)
    plan = Plan(settings=settings, budget=truth.budget)
    request = MeasureRequest(id="trial", task=table.name, device=table.device, plan=plan, options=options)
    outcome = executor.submit(request).result()
    outcome = outcome.model_copy(update={"seconds": seconds_of(table, settings, outcome)})
    return Result(settings, outcome, judge(outcome, truth.budget, 0))


def seconds_of(table: Table, settings: Settings, outcome: Outcome) -> float:
    """Of a trial, as recorded; else by the number of steps. Out of memory shows at the first step."""
    known = table.by_settings[settings.canonical()].seconds
    if known is not None:
        return known
    if not isinstance(outcome, Measured):
        return _START_S
    step_s = (settings.batch.num_samples if settings.batch else 1) / outcome.measurement.samples_per_s.value
    return _START_S + max(_LEAST_TIMED_S, _NUM_STEPS * step_s)


def _settled(results: Sequence[Result], table: Table, truth: Truth, seed: int) -> Settings | None:
    """What the driver would make of the trials so far: the fastest few are measured again, by a repeat that the trial
    did not see, and the fastest by both wins.

    What does not fit by all of the table's repeats falls, as it would when measured again.
    """
    corrections = results[-1].corrections
    fitting: dict[Settings, tuple[float, float]] = {}
    for number, row in enumerate(results):
        if row.verdict.feasible and row.settings.canonical() in truth.fitting:
            found = corrections.get(number, UNCORRECTED)
            fitting.setdefault(row.settings, ((row.verdict.log_speed or 0.0) + found.shift, found.error))
    finalists = sorted(fitting, key=lambda settings: -fitting[settings][0])[:NUM_FINALISTS]

    def again(settings: Settings) -> float:
        repeats = [math.log(repeat) for repeat in table.by_settings[settings.canonical()].samples_per_s]
        if len(repeats) > 1:
            repeats.remove(min(repeats, key=lambda repeat: abs(repeat - fitting[settings][0])))
        return repeats[seed % len(repeats)]

    return max(finalists, key=lambda settings: weighed([fitting[settings], (again(settings), 0.0)]), default=None)
