"""Techniques whose effect is their own, whatever else is chosen: found apart, and confirmed together with the best.

How a loader or an optimizer is implemented changes how long data or an update take, and nothing else. Neither can gain
more than its share of the time, which every trial measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..measure import Measurement
from ..techniques import Facts, Settings, Technique
from ..techniques.data_loading import DataLoading
from ..workers import Measured
from .beliefs import GAIN
from .candidates import ConfigurationSpace
from .study import Study, Tried

__all__ = ["Apart"]

_SHARES: Mapping[str, Callable[[Measurement], float]] = {
    "data_loading": lambda measurement: measurement.loader_wait,
    "optimizer": lambda measurement: measurement.optimizer_share,
}
"""Of each such technique, the share of a training's time that it can take away at most."""
_STARVED = 0.1
"""Share of the reference's time spent waiting for data, from which on nothing else would show."""


class Apart:
    """Proposes their choices for the best that was measured."""

    def __init__(self, study: Study, space: ConfigurationSpace, facts: Facts) -> None:
        """
        Args:
            study: what was measured.
            space: the choices.
            facts: how fast the loader is by itself.
        """
        self._study, self._facts = study, facts
        self._choices = {name: space.choices[name] for name in _SHARES if name in space.choices}

    def base(self, reference: Settings) -> dict[str, Technique]:
        """What they are while everything else is searched: as the reference has them, but for a loader that keeps it
        waiting, in whose place is the one that is fastest by itself."""
        found = {name: self._own(name, reference) for name in self._choices}
        measured = [row for row in self._study.tried if row.number == 0]
        if "data_loading" in found and any(_share("data_loading", row) >= _STARVED for row in measured):
            found["data_loading"] = max(self._choices["data_loading"], key=self._rate)
        return found

    def unconfirmed(self) -> Iterator[Settings]:
        """The best, with each choice that was not tried with it and may gain anything; of one technique at a time."""
        usable = [row for row in self._study.tried if row.verdict.feasible]
        if not usable:
            return
        best = max(usable, key=lambda row: row.verdict.log_speed or 0.0)
        same = [row.settings for row in self._study.tried if self._rest(row.settings) == self._rest(best.settings)]
        for name, choices in self._choices.items():
            tried = [getattr(settings, name) for settings in same]
            left = [choice for choice in choices if choice not in tried]
            if left and _share(name, best) >= math.expm1(GAIN):
                yield from (best.settings.model_copy(update={name: choice}) for choice in left)
                return

    def _rest(self, settings: Settings) -> Settings:
        return settings.model_copy(update={name: choices[0] for name, choices in self._choices.items()})

    def _own(self, name: str, reference: Settings) -> Technique:
        own, choices = getattr(reference, name), self._choices[name]
        return own if own in choices else choices[0]

    def _rate(self, choice: Any) -> float:
        """Samples per second of the loader alone; an epoch in memory is the fastest."""
        assert isinstance(choice, DataLoading)
        if choice.cache != "none":
            return math.inf
        workers = choice.num_workers
        if workers is None:
            workers = self._facts.loader_options.get("num_workers", 0)
        return self._facts.loader_samples_per_s.get(workers, 0.0)


def _share(name: str, tried: Tried) -> float:
    return _SHARES[name](tried.outcome.measurement) if isinstance(tried.outcome, Measured) else 0.0
