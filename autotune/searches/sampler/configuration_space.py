"""The search space as Optuna sees it, the settings that its parameters stand for, and which of these are needless:
techniques that only trade time for memory are dominated where memory is not short."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from ...estimates import Prediction
from ...techniques import Facts, Settings, Technique
from ...techniques.batch import Batch
from ...techniques.checkpointing import Checkpointing
from ...techniques.precision import Kind
from ..store.study import Study
from .configurations import Configuration, Configurations
from .expected_gain import ExpectedGainSampler

Point = Mapping[str, Technique]
"""For each technique a choice: a setting, or a directive such as "choose the blocks"."""
Predict = Callable[[Settings], Prediction | None]
"""Predicts a configuration's memory and work; None where nothing is known."""

NOT_JUDGED = "its quality was not judged beforehand"
"""Why a combination of cuts is left out that is none of those that were found."""
_MOST = 10_000
"""Most configurations that the sampler compares."""


@dataclass(frozen=True)
class Foreseen:
    """Predictions, made before anything is measured."""

    predict: Predict = lambda settings: None
    """The prediction for a configuration."""
    chosen: Callable[[Settings], Settings | None] = lambda settings: None
    """What was chosen block by block for a configuration, whatever its own checkpointing, and nothing else of it; None
    where nothing could be."""


class ConfigurationSpace:
    """The choices as Optuna's parameters: an index for ordered choices, a label for others."""

    def __init__(
        self,
        choices: Mapping[str, tuple[Technique, ...]],
        reference: Settings,
        num_blocks: int = 0,
        foreseen: Foreseen = Foreseen(),
        precision: Kind | None = None,
        functions: frozenset[Settings] | None = None,
    ) -> None:
        """
        Args:
            choices: of each technique.
            reference: the job as it stands.
            num_blocks: of the model.
            foreseen: what is known of each configuration.
            precision: what the task states.
            functions: what a configuration may compute, as settings that affect that alone; None is any.
        """
        self.choices = dict(choices)
        self._reference, self._num_blocks, self._foreseen, self._precision = reference, num_blocks, foreseen, precision
        self._functions = functions
        self._named = [choice for row in choices.values() for choice in row if isinstance(choice, Checkpointing)]
        self._labels = {name: tuple(map(_label, row)) for name, row in self.choices.items()}
        self.distributions: dict[str, BaseDistribution] = {
            name: IntDistribution(0, len(row) - 1) if row[0].ordered else CategoricalDistribution(self._labels[name])
            for name, row in self.choices.items()
            if len(row) > 1
        }

    def foretold(self, foreseen: Foreseen) -> ConfigurationSpace:
        """The same space with other predictions."""
        return self._like(self.choices, foreseen)

    def host_bytes(self, settings: Settings) -> int:
        """What a step is predicted to keep in the host's memory, where that is not the device's; 0 where nothing is
        predicted."""
        known = self._foreseen.predict(settings)
        return 0 if known is None else known.host_bytes

    def narrowed(self, fixed: Mapping[str, Technique]) -> ConfigurationSpace:
        """The same space with a single choice for some techniques; Optuna still sees all of them."""
        assert not any(choice.ordered for choice in fixed.values()), "Optuna sees their place in the whole row"
        choices = {**self.choices, **{name: (choice,) for name, choice in fixed.items()}}
        return self._narrowed(choices)

    def as_it_is(self) -> ConfigurationSpace | None:
        """The same space without what changes the model's function; None where every choice of a technique does, or
        none of any."""
        rows = {name: tuple(one for one in row if not one.changes_function) for name, row in self.choices.items()}
        return self._narrowed(rows) if rows != self.choices and all(rows.values()) else None

    def _narrowed(self, choices: Mapping[str, tuple[Technique, ...]]) -> ConfigurationSpace:
        narrowed = self._like(choices, self._foreseen)
        narrowed.distributions = self.distributions
        return narrowed

    def _like(self, choices: Mapping[str, tuple[Technique, ...]], foreseen: Foreseen) -> ConfigurationSpace:
        of_job = self._reference, self._num_blocks
        return ConfigurationSpace(choices, *of_job, foreseen, self._precision, self._functions)

    @property
    def is_open(self) -> bool:
        """Whether the search chooses which blocks are recomputed."""
        return any(Checkpointing.directive in row for row in self.choices.values())

    @property
    def num_configurations(self) -> int:
        """Number of configurations, the reference included; an upper bound where anything is open or they are many."""
        return self._size - self.conflicts.total() + (self.params(self._reference) is None)

    @property
    def _size(self) -> int:
        return math.prod(map(len, self.choices.values()))

    @cached_property
    def conflicts(self) -> Counter[str]:
        """Reasons why configurations are excluded, with how many each excludes, of at most :data:`_MOST` that are
        looked at."""
        points = itertools.islice(self._points("conflicts"), _MOST)
        return Counter(filter(None, (self.conflict(self.resolved(point)) for point in points)))

    def conflict(self, settings: Settings) -> str | None:
        """Why a configuration is impossible, in words; None where it is not."""
        if self._functions is not None and settings.part("function") not in self._functions:
            return NOT_JUDGED
        return settings.in_force(self._precision).conflict()

    def settings(self, params: Mapping[str, Any]) -> Settings:
        """The settings that Optuna's ``params`` stand for."""
        chosen = {name: row[0] for name, row in self.choices.items()}
        for name, value in params.items():
            row = self.choices[name]
            chosen[name] = row[value] if row[0].ordered else row[self._labels[name].index(value)]
        return self.resolved(chosen)

    def resolved(self, point: Point) -> Settings:
        """The settings that choices stand for. A technique without a choice stays as in the reference; a directive is
        replaced by a setting."""
        named = {name: choice for name, choice in point.items() if choice != Checkpointing.directive}
        settings = self._reference.model_copy(update=named)
        return settings if named == point else self._chosen(settings)

    def _chosen(self, settings: Settings) -> Settings:
        """A configuration with what was chosen for it block by block, else with all blocks recomputed. Where another
        choice of the space recomputes the same blocks, that choice."""
        chosen = self._foreseen.chosen(settings) or Settings(checkpointing=Checkpointing(kind="blocks"))
        numbers = chosen.checkpointing.numbers(self._num_blocks)
        whole = (choice for choice in self._named if choice.kind != "selective")
        others = (choice for choice in whole if choice.numbers(self._num_blocks) == numbers)
        return settings.having(*chosen.chosen(), next(others, Checkpointing.of(numbers, self._num_blocks)))

    def params(self, settings: Settings) -> dict[str, Any] | None:
        """The reverse of :meth:`settings`; None where a choice is not in the space."""
        point: dict[str, Any] = {name: getattr(settings, name) for name in self.choices}
        if (open_to := self._chosen_for(settings)) is not None:
            point = {name: getattr(open_to, name) for name in self.choices}
            point[Checkpointing.name] = Checkpointing.directive
        if any(choice not in self.choices[name] for name, choice in point.items()):
            return None
        rows = ((name, self.choices[name], point[name]) for name in self.distributions)
        return {name: row.index(choice) if row[0].ordered else _label(choice) for name, row, choice in rows}

    def _everywhere(self, settings: Settings) -> Settings:
        """With what is in some blocks in all of them, but for checkpointing."""
        every = range(self._num_blocks)
        return settings.having(*(one.in_blocks(every, len(every)) for one in self._in_blocks(settings)))

    @staticmethod
    def _in_blocks(settings: Settings) -> Iterator[Technique]:
        """What may be in some blocks alone, but for checkpointing, whose work is counted."""
        return (one for one in settings.chosen() if one.adds_up == "blocks" and one.name != Checkpointing.name)

    def sampler(self, study: Study) -> ExpectedGainSampler:
        """This package's own sampler, over all configurations of the choices that may be of use."""
        record, rows = study.record, []
        # of inference no memory is predicted: without a limit, there is enough until something did not fit
        is_free = record.facts.inference and record.budget.of_device is None
        is_free = is_free and not any(row.verdict.over_memory for row in study.tried)
        for settings in dict.fromkeys(itertools.chain(*self.weighed(record.seed))):
            if not self.is_needless(settings, math.inf if is_free else record.usable_bytes):
                rows.append(self._configuration(settings, record.facts))
        configurations = Configurations(rows, self.distributions, "batch").derived(record.usable_bytes)
        tried = [row for row in study.tried if self.params(row.settings) is not None]
        # The sampler learns from configurations that it knows: of the reference too, whose batch may be left out above.
        configurations = configurations.joined(self._configuration(row.settings, record.facts) for row in tried)
        margin = record.budget.margin
        return ExpectedGainSampler(
            configurations,
            limit_bytes=record.limit_bytes,
            margin=margin,
            seed=record.seed,
        )

    def believed_best(self, study: Study) -> Settings:
        """What is believed fastest, before any trial, of that which is as sure as any to fit."""
        return self.settings(self.sampler(study).believed_best())

    def is_chosen(self, settings: Settings) -> bool:
        """Whether it was chosen in which blocks something is."""
        found = self._chosen_for(settings)
        return found is not None and self._foreseen.chosen(found) is not None

    def _chosen_for(self, settings: Settings) -> Settings | None:
        """The configuration that has these settings where its blocks are to be chosen; None where the space names
        them."""
        is_named = all(getattr(settings, name) in row for name, row in self.choices.items())
        open_to = () if is_named or not self.is_open else (self._everywhere(settings), settings)
        return next((one for one in open_to if settings == self._chosen(one)), None)

    def _configuration(self, settings: Settings, facts: Facts) -> Configuration:
        batch = settings.batch
        micro_batch, packed = (batch.micro, batch.packed) if batch else (None, False)
        known = self._foreseen.predict(settings)
        gains = self._gains(settings.in_force(facts.precision))
        lossy = [one for one in settings.chosen() if "function" in one.affects]
        function = settings.part("function").canonical() if lossy else ""
        removed = {one.name: one.removed(facts) for one in lossy}
        return Configuration(self.params(settings) or {}, micro_batch, known, gains, function, removed, packed)

    def _gains(self, settings: Settings) -> dict[str, tuple[float, float]]:
        """As believed of each technique; of one that is in some blocks alone, in proportion."""
        gains, every = settings.prior_gains(), range(self._num_blocks)
        for one in self._in_blocks(settings):
            if one != one.in_blocks(every, len(every)) and one.name in gains:
                mean, spread = gains[one.name]
                share = len(one.numbers(len(every))) / len(every)
                gains[one.name] = (share * mean, share * spread)
        return gains

    def is_needless(self, settings: Settings, usable_bytes: float) -> bool:
        """Whether a configuration trades time for memory although, by predictions, memory is not short; without end,
        whatever is predicted. None is where the space has no choice that does without."""
        bought = [one for one in settings.techniques() if one.trades_time and one != type(one)()]
        if any(type(one)() not in self.choices.get(one.name, ()) for one in bought):
            return False
        if usable_bytes == math.inf:
            return bool(bought)
        largest = self.choices["batch"][-1] if "batch" in self.choices else settings.batch
        assert largest is None or isinstance(largest, Batch)
        return is_needless(settings, largest, self._foreseen.predict, usable_bytes)

    def weighed(self, seed: int) -> tuple[list[Settings], list[Settings]]:
        """Configurations that the sampler compares: all of them, or so many at random from a larger space.

        Returns:
            Those whose blocks, if any, the space names, and those whose blocks were to be chosen.
        """
        found = list(itertools.islice(self._possible(f"{seed}:weighed"), _MOST))
        return [settings for settings, is_open in found if not is_open], [one for one, is_open in found if is_open]

    def shuffled(self, seed: str) -> Iterator[Settings]:
        """Every configuration once, in random order by ``seed``."""
        found = self._possible(seed)
        return (one for one, is_open in found if not (is_open and one.checkpointing in self._named))

    def _possible(self, seed: str) -> Iterator[tuple[Settings, bool]]:
        """Every possible configuration, and whether its blocks were to be chosen."""
        for point in self._points(seed):
            settings = self.resolved(point)
            if self.conflict(settings) is None:
                yield settings, point.get(Checkpointing.name) == Checkpointing.directive

    def _points(self, seed: str) -> Iterator[Point]:
        size = self._size
        rng = random.Random(seed)
        start, stride = rng.randrange(size), rng.randrange(1, size + 1)
        while math.gcd(stride, size) != 1:  # a stride prime to the size visits every index once
            stride += 1
        for step in range(size):
            rest, point = (start + step * stride) % size, {}
            for name, row in self.choices.items():
                rest, index = divmod(rest, len(row))
                point[name] = row[index]
            yield point


def _label(choice: Technique) -> str:
    """A text that stands for a choice in the study, whatever other choices there are."""
    return json.dumps(
        choice.model_dump(mode="json", exclude_defaults=True, exclude={*choice.kept_beside}), sort_keys=True
    )


def buys_memory(settings: Settings) -> bool:
    """Whether any technique trades time for memory."""
    return any(one.trades_time and one != type(one)() for one in settings.techniques())


def is_needless(
    settings: Settings, largest: Batch | None, predict: Callable[[Settings], Prediction | None], usable_bytes: float
) -> bool:
    """Whether a configuration trades time for memory although even the largest batch is sure to fit without.

    Args:
        settings: the configuration.
        largest: batch there is; None where nothing chooses it.
        predict: what is known of a configuration.
        usable_bytes: what a peak may be.
    """
    if not buys_memory(settings):
        return False
    stock = {one.name: type(one)() for one in settings.techniques() if one.trades_time}
    known = predict(settings.model_copy(update={**stock, "batch": largest}))
    return known is not None and (known.high_bytes or known.peak_bytes) <= usable_bytes
