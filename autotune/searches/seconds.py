"""Where a search's seconds go: by what was done, and by the phases of the runs."""

from __future__ import annotations

from collections.abc import Mapping

from ..workers import Measured, Outcome
from ..workers.outcome import sides_of

Spent = Mapping[str, Mapping[str, float]]
"""Seconds by what was done, and by the phases of its runs."""

_STARTED, _READING, _REFERENCE = "starting", "reading", "reference"
_DONE = {"trial": "trials", "anchor": "anchors", "predict": "predicting", "cuts": "judging cuts", "without": "ablation"}
"""What is done, by the first part of a request's name; all others are of the finalists."""
_FINALISTS = "finalists"
BETWEEN = "between runs"
"""What no run that counts took: choosing trials, runs that were done again."""
BESIDE = "beside"
"""The phase of a run that it does not tell apart: its process starts and ends."""
_STARTING = ("load", "apply")
"""Phases of a run before its first step."""
_ORDER = (
    _STARTED,
    _READING,
    "judging cuts",
    _REFERENCE,
    "predicting",
    "trials",
    "anchors",
    _FINALISTS,
    "ablation",
    BETWEEN,
)


class Seconds:
    """Adds up what each outcome took, as it is learned. Of trials at once, each counts."""

    def __init__(self, started_s: float, read_s: float, earlier: Spent | None = None) -> None:
        """Begin with what is known when a search's trials begin.

        Args:
            started_s: until there was a process to read the task in.
            read_s: reading the task.
            earlier: what earlier processes of the same study spent.
        """
        self._earlier = earlier or {}
        self._own: dict[str, dict[str, float]] = {}
        self._add(_STARTED, started_s, {})
        self._add(_READING, read_s, {})

    def learn(self, name: str, outcome: Outcome) -> None:
        """Take in the outcome of the request of this name."""
        done = _REFERENCE if name == "trial-000" else _DONE.get(name.partition("-")[0], _FINALISTS)
        measured = [side.measurement.phases_s for side in sides_of(outcome) if isinstance(side, Measured)]
        phases_s = _sum(*measured)
        if len(measured) == 2:  # both start at once, and compute in turn
            longer = {phase: max(one.get(phase, 0.0) for one in measured) for phase in _STARTING}
            phases_s = {phase: longer.get(phase, value) for phase, value in phases_s.items()}
        self._add(done, outcome.seconds, phases_s)

    def spent(self, elapsed_s: float) -> Spent:
        """All of it, in the order of a search; ``elapsed_s`` is how long this process has searched."""
        between_s = max(elapsed_s - total_s(self._own), 0.0)
        rows = {**self._own, BETWEEN: {BESIDE: between_s}}
        whole = {done: _sum(self._earlier.get(done, {}), rows.get(done, {})) for done in _ORDER}
        return {done: {phase: round(value, 2) for phase, value in row.items()} for done, row in whole.items() if row}

    def _add(self, done: str, seconds: float, phases: Mapping[str, float]) -> None:
        beside = {BESIDE: max(seconds - sum(phases.values()), 0.0)}
        self._own[done] = _sum(self._own.get(done, {}), phases, beside)


def total_s(spent: Spent) -> float:
    """All of it."""
    return sum(sum(phases.values()) for phases in spent.values())


def _sum(*rows: Mapping[str, float]) -> dict[str, float]:
    """Phase by phase, those that took any time."""
    whole: dict[str, float] = {}
    for phase, seconds in (item for row in rows for item in row.items()):
        whole[phase] = whole.get(phase, 0.0) + seconds
    return {phase: seconds for phase, seconds in whole.items() if seconds}
