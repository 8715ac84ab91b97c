"""Which configuration to measure next: the sampler's proposals, and what is known without measuring.

Where not everything could be predicted, this package's own sampler begins with a guess.
"""

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

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from ..estimate import Prediction
from ..techniques import Settings, Technique
from ..techniques.batch import Batch
from ..techniques.checkpointing import Checkpointing
from ..techniques.precision import Kind
from .configurations import Configuration, Configurations
from .expected_gain import ExpectedGainSampler
from .options import SamplerName
from .sampler import build_sampler
from .study import Study, Tried
from .trades import is_needless

__all__ = ["Candidates", "ConfigurationSpace", "Foreseen", "Point", "Predict", "Proposal"]

Point = Mapping[str, Technique]
"""A choice of each row: a setting, or a directive."""
Predict = Callable[[Settings], Prediction | None]
"""What is known of a configuration before it is measured."""

_PATIENCE = 5
"""Proposals in a row that need no measuring before one is drawn from what is left."""

_MOST = 10_000
"""Configurations that are weighed against each other."""


@dataclass(frozen=True)
class Foreseen:
    """What is known before anything is measured."""

    predict: Predict = lambda settings: None
    """Of a configuration."""
    blocks: Callable[[Settings], tuple[int, ...] | None] = lambda settings: None
    """The blocks that were chosen for one, whatever its own checkpointing; None where none could be."""


class ConfigurationSpace:
    """The choices as Optuna sees them: an index where they lie on a line, a label elsewhere."""

    def __init__(
        self,
        choices: Mapping[str, tuple[Technique, ...]],
        reference: Settings,
        num_blocks: int = 0,
        foreseen: Foreseen = Foreseen(),
        precision: Kind | None = None,
    ) -> None:
        """
        Args:
            choices: of each technique.
            reference: the job as it stands.
            num_blocks: of the model.
            foreseen: what is known of each configuration.
            precision: what the task states.
        """
        self.choices = dict(choices)
        self._reference, self._num_blocks, self._foreseen, self._precision = reference, num_blocks, foreseen, precision
        recomputed = choices.get("checkpointing", ())
        self._named = [choice for choice in recomputed if isinstance(choice, Checkpointing)]
        self._labels = {name: tuple(map(_label, row)) for name, row in self.choices.items()}
        self.distributions: dict[str, BaseDistribution] = {
            name: IntDistribution(0, len(row) - 1) if row[0].ordered else CategoricalDistribution(self._labels[name])
            for name, row in self.choices.items()
            if len(row) > 1
        }

    def foretold(self, foreseen: Foreseen) -> ConfigurationSpace:
        """The same with what is known of each configuration."""
        return ConfigurationSpace(self.choices, self._reference, self._num_blocks, foreseen, self._precision)

    def narrowed(self, fixed: Mapping[str, Technique]) -> ConfigurationSpace:
        """The same with one choice alone of some techniques; Optuna sees it among all."""
        assert not any(choice.ordered for choice in fixed.values()), "Optuna sees their place in the whole row"
        choices = {**self.choices, **{name: (choice,) for name, choice in fixed.items()}}
        narrowed = ConfigurationSpace(choices, self._reference, self._num_blocks, self._foreseen, self._precision)
        narrowed.distributions = self.distributions
        return narrowed

    @property
    def is_open(self) -> bool:
        """Whether the search is to choose which blocks are recomputed."""
        return Checkpointing.directive in self.choices.get("checkpointing", ())

    @property
    def num_configurations(self) -> int:
        """Settings that may be measured, the reference included; at most, where anything is open or they are many."""
        return self._size - self.conflicts.total() + (self.params(self._reference) is None)

    @property
    def _size(self) -> int:
        return math.prod(map(len, self.choices.values()))

    @cached_property
    def conflicts(self) -> Counter[str]:
        """Why configurations are left out, and how many, of at most :data:`_MOST` that are looked at."""
        points = itertools.islice(self._points("conflicts"), _MOST)
        return Counter(filter(None, (self.conflict(self.resolved(point)) for point in points)))

    def conflict(self, settings: Settings) -> str | None:
        """Why a configuration cannot be had, in words."""
        return settings.in_force(self._precision).conflict()

    def settings(self, params: Mapping[str, Any]) -> Settings:
        """The settings that Optuna's ``params`` stand for."""
        chosen = {name: row[0] for name, row in self.choices.items()}
        for name, value in params.items():
            row = self.choices[name]
            chosen[name] = row[value] if row[0].ordered else row[self._labels[name].index(value)]
        return self.resolved(chosen)

    def resolved(self, point: Point) -> Settings:
        """The settings that choices stand for; what has none stays as the reference has it. A directive ends here."""
        named = {name: choice for name, choice in point.items() if choice != Checkpointing.directive}
        settings = self._reference.model_copy(update=named)
        return settings if named == point else settings.model_copy(update={"checkpointing": self._chosen(settings)})

    def _chosen(self, settings: Settings) -> Checkpointing:
        """The blocks that were chosen for a configuration, else all. Where another choice of the space recomputes the
        same, it is that one."""
        blocks = self._foreseen.blocks(settings)
        numbers = tuple(range(self._num_blocks)) if blocks is None else blocks
        others = (choice for choice in self._named if choice.numbers(self._num_blocks) == numbers)
        return next(others, Checkpointing.of(numbers, self._num_blocks))

    def params(self, settings: Settings) -> dict[str, Any] | None:
        """The reverse of :meth:`settings`; None where a choice is not in the space."""
        point = {name: getattr(settings, name) for name in self.choices}
        if (
            self.is_open
            and settings.checkpointing not in self._named
            and settings.checkpointing == self._chosen(settings)
        ):
            point["checkpointing"] = Checkpointing.directive
        if any(choice not in self.choices[name] for name, choice in point.items()):
            return None
        rows = ((name, self.choices[name], point[name]) for name in self.distributions)
        return {name: row.index(choice) if row[0].ordered else _label(choice) for name, row, choice in rows}

    def sampler(self, study: Study) -> ExpectedGainSampler:
        """This package's own, over all configurations of the choices that may be of use."""
        record, rows = study.record, []
        for settings in dict.fromkeys(itertools.chain(*self.weighed(record.seed))):
            if not self.is_needless(settings, record.usable_bytes):
                micro_batch = settings.batch.micro if settings.batch else None
                known = self._foreseen.predict(settings)
                gains = settings.in_force(record.facts.precision).prior_gains()
                rows.append(Configuration(self.params(settings) or {}, micro_batch, known, gains))
        configurations = Configurations(rows, self.distributions, "batch").derived(record.usable_bytes)
        margin = record.budget.margin
        return ExpectedGainSampler(configurations, limit_bytes=record.limit_bytes, margin=margin, seed=record.seed)

    def is_needless(self, settings: Settings, usable_bytes: float) -> bool:
        """Whether it buys memory with time where none is wanting, by what is known."""
        largest = self.choices["batch"][-1] if "batch" in self.choices else settings.batch
        assert largest is None or isinstance(largest, Batch)
        return is_needless(settings, largest, self._foreseen.predict, usable_bytes)

    def weighed(self, seed: int) -> tuple[list[Settings], list[Settings]]:
        """What is weighed against each other: every configuration, or of a larger space so many at random.

        Returns:
            Those whose blocks, if any, the space names, and those whose blocks were to be chosen.
        """
        found = list(itertools.islice(self._possible(f"{seed}:weighed"), _MOST))
        return [settings for settings, is_open in found if not is_open], [one for one, is_open in found if is_open]

    def shuffled(self, seed: str) -> Iterator[Settings]:
        """Every configuration once, in an order of its own for each ``seed``."""
        found = self._possible(seed)
        return (one for one, is_open in found if not (is_open and one.checkpointing in self._named))

    def _possible(self, seed: str) -> Iterator[tuple[Settings, bool]]:
        """Every configuration that can be had, and whether its blocks were to be chosen."""
        for point in self._points(seed):
            settings = self.resolved(point)
            if self.conflict(settings) is None:
                yield settings, point.get("checkpointing") == Checkpointing.directive

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


@dataclass(frozen=True)
class Proposal:
    """A configuration that is about to be measured."""

    trial: optuna.Trial
    number: int
    settings: Settings


class Candidates:
    """Proposes what to measure; never the same configuration twice, nor one that is known not to fit."""

    def __init__(self, study: Study, space: ConfigurationSpace, reference: Settings) -> None:
        """
        Args:
            study: what was measured, and what Optuna is told.
            space: the choices.
            reference: the job as it stands.
        """
        self._study, self._space, self._reference = study, space, reference
        self._searched = space
        self._in_flight: set[str] = set()
        self._guesses: Callable[[], Iterator[Point]] = _nothing
        self._unconfirmed: Callable[[], Iterator[Settings]] = _nothing

    def use(
        self,
        sampler: SamplerName,
        foreseen: Foreseen,
        fixed: Mapping[str, Technique],
        unconfirmed: Callable[[], Iterator[Settings]],
    ) -> None:
        """Say who proposes after the reference.

        Args:
            sampler: its name.
            foreseen: what is known of each configuration.
            fixed: what ``law`` does not choose.
            unconfirmed: what ``law`` measures of that once it expects no more.
        """
        self._space = self._searched = self._space.foretold(foreseen)
        if sampler == "law":
            self._searched = self._space.narrowed(fixed)
            knowing = self._searched.sampler(self._study)
            self._study.use(sampler, knowing)
            self._unconfirmed = unconfirmed
            if not knowing.configurations.are_predicted:
                self._guesses = self._promising
        else:
            self._study.use(sampler, build_sampler(sampler, self._study.record.seed, self._study.num_asked))

    def reference(self) -> Proposal:
        """Trial 0."""
        return self._ask_for(self._reference)

    def next(self, trials_left: int) -> Proposal | None:
        """What to measure next; None when every configuration has been measured or is known not to fit.

        Args:
            trials_left: this one included; the last are for what is still to be confirmed.
        """
        for guess in itertools.chain(self._study.lost, map(self._space.resolved, self._guesses())):
            if self._is_new(guess):
                return self._ask_for(guess)
        unconfirmed = self._new_unconfirmed()
        if unconfirmed and (len(unconfirmed) >= trials_left or self._study.settled()):
            return self._ask_for(unconfirmed[0])
        for _ in range(_PATIENCE if self._space.distributions else 0):
            trial = self._study.ask(self._space.distributions)
            settings = self._space.settings(trial.params)
            if self._is_new(settings):
                return self._begin(trial, settings)
            self._study.skip(trial, self._measured(settings) or self._witness(settings))
        left = self._searched.shuffled(f"{self._study.record.seed}:{len(self._study.tried)}")
        return next((self._ask_for(settings) for settings in left if self._is_new(settings)), None)

    def settled(self) -> str | None:
        """Why the sampler expects no more, in words; None where it does, or something is to be asked again or to be
        confirmed."""
        waiting = any(map(self._is_new, self._study.lost)) or self._new_unconfirmed()
        return None if waiting else self._study.settled()

    def finish(self, proposal: Proposal) -> None:
        """A proposal is no longer in flight."""
        self._in_flight.discard(proposal.settings.canonical())

    def fell(self, row: Tried) -> None:
        """What was measured again did not hold: whoever proposes learns of it."""
        params = self._space.params(row.settings)
        if params:
            self._study.skip(self._study.ask(self._space.distributions, params), row)

    def _new_unconfirmed(self) -> list[Settings]:
        return [settings for settings in self._unconfirmed() if self._is_new(settings)]

    def _promising(self) -> Iterator[Point]:
        """Before the sampler: the most promising choice of everything at the largest batch that fits, by bisection; and
        again with what buys memory for time, where the reference's own batch did not fit without."""
        for with_trades in (False, True):
            promising = {
                name: self._most_promising(name)
                for name, row in self._searched.choices.items()
                if name != "batch" and (with_trades or not row[0].trades_time)
            }
            yield promising
            first = self._measured(self._space.resolved(promising))
            if first is None or not first.verdict.over_memory:
                return
            yield from self._bisect(promising)

    def _most_promising(self, name: str) -> Technique:
        """The choice after the first, unless it is believed to be slower than that and buys nothing with it."""
        first, *others = self._searched.choices[name]
        if not others or others[0].trades_time:
            return others[0] if others else first
        stated = self._study.record.facts.precision
        settings = (self._reference.model_copy(update={name: one}).in_force(stated) for one in (first, others[0]))
        gains = [one.prior_gains().get(name, (0.0, 0.0)) for one in settings]
        return first if gains[1] < gains[0] else others[0]

    def _bisect(self, combination: Point) -> Iterator[Point]:
        """The next batch between the largest that is known to fit and the smallest that is known not to."""
        batches = self._space.choices.get("batch", ())
        fits, over = -1, len(batches)
        for index, batch in enumerate(batches):
            known = self._measured(self._space.resolved({**combination, "batch": batch}))
            if known is not None and known.verdict.over_memory:
                over = min(over, index)
            elif known is not None:
                fits = max(fits, index)
        if over - fits > 1:
            yield {**combination, "batch": batches[(fits + over) // 2]}

    def _is_new(self, settings: Settings) -> bool:
        known = settings.canonical() in self._in_flight or self._measured(settings) or self._witness(settings)
        return not known and self._space.conflict(settings) is None

    def _measured(self, settings: Settings) -> Tried | None:
        return self._study.by_settings.get(settings.canonical())

    def _witness(self, settings: Settings) -> Tried | None:
        """A trial that did not fit and proves that ``settings``, which need at least as much memory, do not either.

        The proof holds between configurations that are equal in everything but the batch. With a larger micro-batch
        every activation grows and nothing shrinks, unless accumulation ends: only then are there no gradients of
        earlier micro-batches beside the activations, so that a split batch proves nothing about a whole one.
        """
        batch = settings.batch
        if batch is None:
            return None
        for row in self._study.tried:
            tried = row.settings.batch
            if tried is None or not row.verdict.over_memory or tried.micro >= batch.micro:
                continue
            same = row.settings.model_copy(update={"batch": batch}) == settings
            if same and (tried.accumulate == 1 or batch.accumulate > 1):
                return row
        return None

    def _ask_for(self, settings: Settings) -> Proposal:
        params = self._space.params(settings)  # None outside the space: the trial is told to nobody
        trial = self._study.ask(self._space.distributions if params else {}, params or {})
        return self._begin(trial, settings)

    def _begin(self, trial: optuna.Trial, settings: Settings) -> Proposal:
        self._in_flight.add(settings.canonical())
        return Proposal(trial, self._study.begin(trial, settings), settings)


def _nothing() -> Iterator[Any]:
    return iter(())


def _label(choice: Technique) -> str:
    """A text that stands for a choice in the study, whatever other choices there are."""
    return json.dumps(choice.model_dump(mode="json", exclude_defaults=True), sort_keys=True)
