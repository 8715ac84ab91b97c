"""Techniques with an effect of their own, whatever else is chosen: measured apart, then confirmed with the best.

The loader and the optimizer's implementation change how long data or an update take, and hardly anything else. Neither
can gain more than its share of the time, which every trial measures. The exception are loader workers on a CPU: they
use a training's processors even while nothing waits for data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from ...measure import Measurement
from ...techniques import TECHNIQUES, Effect, Facts, Settings, Technique
from ...workers import Measured
from ..store.study import Study
from ..store.tried import Tried
from .acquisition import GAIN
from .configuration_space import ConfigurationSpace

_SHARES: Mapping[Effect, Callable[[Measurement], float]] = {
    "loader": lambda measurement: measurement.loader_wait,
    "update": lambda measurement: measurement.optimizer_share,
}
"""For a technique with this effect alone, the share of a training's time that it can save at most."""
_STARVED = 0.1
"""Share of the reference's time spent waiting for data from which on other techniques' gains would not show."""

_SPARE = 1.25
"""How much faster than the training a loader has to be by itself for it to be likely to keep up beside it."""


class Separable:
    """Proposes choices of separable techniques for the best configuration measured."""

    def __init__(self, study: Study, space: ConfigurationSpace, facts: Facts) -> None:
        """
        Args:
            study: what was measured.
            space: the choices.
            facts: how fast the loader is by itself.
        """
        self._study, self._facts = study, facts
        apart = {name for name, technique in TECHNIQUES.items() if technique.affects <= _SHARES.keys()}
        self._choices = {name: row for name, row in space.choices.items() if name in apart}

    def base(self, reference: Settings) -> dict[str, Technique]:
        """Their choices while everything else is searched: the reference's, or, where the reference waits for data, the
        loader that is fastest by itself and fits beside the training."""
        found = {name: self._own(name, reference) for name in self._choices}
        first = next((row for row in self._study.tried if row.number == 0), None)
        if first is None or not isinstance(first.outcome, Measured):
            return found
        room = max(self._study.record.usable_bytes - first.outcome.measurement.peak.process, 0)
        for name in self._choices:
            fitting = [one for one in self._fastest(name) if one.cached_bytes(self._facts) <= room]
            if fitting and _share(name, first) >= _STARVED:
                found[name] = fitting[0]
        return found

    def unconfirmed(self) -> Iterator[Settings]:
        """The best configuration with each choice that was not tried with it and may gain something, one technique at a
        time; of loaders, only the fastest by themselves, and the fewest workers that may be enough."""
        best = next(iter(self._study.feasible), None)
        if best is None:
            return
        same = [row.settings for row in self._study.tried if self._rest(row.settings) == self._rest(best.settings)]
        for name, choices in self._choices.items():
            tried = [getattr(settings, name) for settings in same]
            worthwhile = self._fastest_of_either(name) or choices
            wanted = [*(worthwhile if self._may_gain(name, best) else ()), *self._enough(name, best)]
            yield from (best.settings.having(one) for one in dict.fromkeys(wanted) if one not in tried)

    def _may_gain(self, name: str, best: Tried) -> bool:
        return getattr(best.settings, name).takes_processors(self._facts) or _share(name, best) >= math.expm1(GAIN)

    def _enough(self, name: str, best: Tried) -> list[Technique]:
        """The choice with the fewest processes beside the training that load faster by themselves than the best
        more: they may gain nothing."""
        needed = _SPARE * math.exp(best.verdict.log_speed or 0.0)
        own = getattr(best.settings, name).num_loading(self._facts)
        fewer = [one for one in self._fastest(name) if 0 < one.num_loading(self._facts) < own]
        found = [one for one in fewer if needed <= (one.samples_per_s(self._facts) or 0.0) < math.inf]
        return sorted(found, key=lambda one: one.num_loading(self._facts))[:1]

    def _fastest(self, name: str) -> list[Technique]:
        """Loader choices with a measured speed of their own, the fastest first."""
        rated = [(rate, one) for one in self._choices[name] if (rate := one.samples_per_s(self._facts)) is not None]
        return [one for _, one in sorted(rated, key=lambda row: -row[0])]

    def _fastest_of_either(self, name: str) -> list[Technique]:
        """The fastest that caches an epoch, and the fastest that loads samples anew."""
        found: dict[bool, Technique] = {}
        for one in self._fastest(name):
            found.setdefault(one.samples_per_s(self._facts) == math.inf, one)
        return list(found.values())

    def _rest(self, settings: Settings) -> Settings:
        return settings.model_copy(update={name: choices[0] for name, choices in self._choices.items()})

    def _own(self, name: str, reference: Settings) -> Technique:
        own, choices = getattr(reference, name), self._choices[name]
        return own if own in choices else choices[0]


def _share(name: str, tried: Tried) -> float:
    if not isinstance(tried.outcome, Measured):
        return 0.0
    return sum(_SHARES[effect](tried.outcome.measurement) for effect in TECHNIQUES[name].affects)
