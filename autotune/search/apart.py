"""Techniques whose effect is their own, whatever else is chosen: found apart, and confirmed together with the best.

How a loader or an optimizer is implemented changes how long data or an update take, and hardly anything else. Neither
can gain more than its share of the time, which every trial measures; but for loader workers on a CPU, which take a
training's processors while it waits for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

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
        waiting, in whose place is the one that is fastest by itself and leaves it room."""
        found = {name: self._own(name, reference) for name in self._choices}
        for row in self._study.tried:
            if row.number == 0 and isinstance(row.outcome, Measured) and _share("data_loading", row) >= _STARVED:
                room = max(self._study.record.usable_bytes - row.outcome.measurement.peak.process, 0)
                fitting = [one for one in self._loaders() if one.cached_bytes(self._facts) <= room]
                found |= {"data_loading": max(fitting, key=self._rate)} if fitting else {}
        return found

    def unconfirmed(self) -> Iterator[Settings]:
        """The best, with each choice that was not tried with it and may gain anything, one technique after the other;
        of loaders, those that are fastest by themselves."""
        best = next(iter(self._study.feasible), None)
        if best is None:
            return
        same = [row.settings for row in self._study.tried if self._rest(row.settings) == self._rest(best.settings)]
        for name, choices in self._choices.items():
            tried = [getattr(settings, name) for settings in same]
            worthwhile = self._fastest_loaders() if name == "data_loading" else choices
            if self._may_gain(name, best):
                yield from (best.settings.model_copy(update={name: one}) for one in worthwhile if one not in tried)

    def _may_gain(self, name: str, best: Tried) -> bool:
        takes_processors = (
            name == "data_loading"
            and self._facts.device.type == "cpu"
            and self._num_workers(best.settings.data_loading) > 0
        )
        return takes_processors or _share(name, best) >= math.expm1(GAIN)

    def _loaders(self) -> list[DataLoading]:
        return [one for one in self._choices.get("data_loading", ()) if isinstance(one, DataLoading)]

    def _fastest_loaders(self) -> list[DataLoading]:
        """A cached epoch, and what loads samples anew: the fastest of either."""
        found: dict[bool, DataLoading] = {}
        for loader in sorted(self._loaders(), key=self._rate, reverse=True):
            found.setdefault(loader.cache != "none", loader)
        return list(found.values())

    def _rest(self, settings: Settings) -> Settings:
        return settings.model_copy(update={name: choices[0] for name, choices in self._choices.items()})

    def _own(self, name: str, reference: Settings) -> Technique:
        own, choices = getattr(reference, name), self._choices[name]
        return own if own in choices else choices[0]

    def _rate(self, loader: DataLoading) -> float:
        """Samples per second of the loader alone; an epoch in memory is the fastest."""
        if loader.cache != "none":
            return math.inf
        return self._facts.loader_samples_per_s.get(self._num_workers(loader), 0.0)

    def _num_workers(self, loader: DataLoading) -> int:
        own = self._facts.loader_options.get("num_workers", 0)
        return own if loader.num_workers is None else loader.num_workers


def _share(name: str, tried: Tried) -> float:
    return _SHARES[name](tried.outcome.measurement) if isinstance(tried.outcome, Measured) else 0.0
