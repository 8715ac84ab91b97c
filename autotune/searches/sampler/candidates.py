"""Which configuration to measure next: the sampler's proposals, without those whose outcome is known.

Where not everything could be predicted, this package's own sampler begins with a guess.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import optuna
from optuna.samplers import BaseSampler

from ...techniques import Settings, Technique
from ..options import SamplerName
from ..store.study import Study
from ..store.tried import Tried
from ..verdict import CONSTRAINTS
from .configuration_space import ConfigurationSpace, Foreseen, Point
from .expected_gain import ExpectedGainSampler
from .loaders import Loaders

Promise = Callable[[Mapping[str, Any]], float | None]
Part = Literal["same", "changed", "all"]
"""Of a space: configurations that compute what the job does, or that compute something else, or both."""

_PATIENCE = 5
"""Proposals in a row with known outcomes before one is drawn at random from the rest."""
_NUM_STARTUP = 6
"""Trials before a sampler's model is used; those that were not its own proposals count."""


@dataclass(frozen=True)
class Proposal:
    """A configuration that is about to be measured."""

    trial: optuna.Trial
    number: int
    settings: Settings
    promise: float | None = None
    """Expected gain for each second of its trial; None where the sampler cannot tell."""


class Candidates:
    """Proposes what to measure; never a configuration twice, nor one that is known not to fit."""

    def __init__(
        self, study: Study, space: ConfigurationSpace, reference: Settings, start: Sequence[Settings] = ()
    ) -> None:
        """
        Args:
            study: what was measured, and what Optuna is told.
            space: the choices.
            reference: the job as it stands.
            start: what is measured before anything that a sampler proposes.
        """
        self._start = start
        self._study, self._space, self._reference = study, space, reference
        self._searched, self._loaders = space, Loaders(study, lambda settings: self._space.host_bytes(settings))
        self._in_flight: set[str] = set()
        self._part: Part = "all"
        self._samplers: dict[Part, tuple[ConfigurationSpace, ExpectedGainSampler]] = {}
        """Of each part that a sampler tells from the others, what it searches."""
        self._unconfirmed: Callable[[], Iterator[Settings]] = _nothing

    def use(
        self,
        sampler: SamplerName,
        foreseen: Foreseen,
        fixed: Mapping[str, Technique],
        unconfirmed: Callable[[], Iterator[Settings]],
        is_tight: bool,
    ) -> None:
        """Set the sampler that proposes after the reference, of all parts.

        Args:
            sampler: its name.
            foreseen: what is known of each configuration.
            fixed: what ``gain`` does not choose.
            unconfirmed: what ``gain`` measures of that once it expects no more.
            is_tight: whether the job as it stands does not fit: ``gain`` begins with what is believed fastest of that
                which is as sure as any to, if it was chosen block by block.
        """
        self._space = self._searched = self._space.foretold(foreseen)
        if sampler != "gain":
            self._study.use(sampler, build_sampler(sampler, self._study.record.seed, self._study.num_asked))
            return
        whole = self._space.narrowed(fixed)
        self._samplers = {"all": (whole, whole.sampler(self._study))}
        if (same := whole.as_it_is()) is not None:
            self._samplers |= {"same": (same, same.sampler(self._study)), "changed": self._samplers["all"]}
        self._unconfirmed = unconfirmed
        first, _ = self._samplers.get("same", self._samplers["all"])
        if is_tight and first.is_chosen(best := first.believed_best(self._study)):
            self._start = (*self._start, best)
        self.take("all")

    @property
    def has_parts(self) -> bool:
        """Whether configurations that change the function are searched beside others."""
        return len(self._samplers) > 1

    def take(self, part: Part) -> None:
        """Propose of this part alone from now on."""
        if part not in self._samplers:  # one of Optuna's samplers knows no parts
            return
        self._part = part
        self._searched, sampler = self._samplers[part]
        sampler.changed_alone = part == "changed"
        self._study.use("gain", sampler)

    def is_open(self, part: Part) -> bool:
        """Whether something of a part may be worth a trial; it is taken."""
        self.take(part)
        return self._study.settled() is None

    def reference(self) -> Proposal:
        """Trial 0."""
        return self._ask_for(self._reference)

    def known(self, settings: Settings) -> Proposal | None:
        """One that another search has measured; None where this one has it, or cannot have it. What is sure not to fit
        here tells of speeds all the same."""
        is_here = settings.canonical() in self._in_flight or self._measured(settings) is not None
        return None if is_here or self._space.conflict(settings) is not None else self._ask_for(settings)

    def next(self, trials_left: int) -> Proposal | None:
        """What to measure next; None when every configuration has been measured or is known not to fit.

        Args:
            trials_left: this one included; the last are for what is still to be confirmed.
        """
        promise = self._study.promises()
        for guess in itertools.chain(self._study.lost, self._start, map(self._space.resolved, self._guesses())):
            if self._is_new(guess):
                return self._ask_for(guess, promise)
        unconfirmed = self._new_unconfirmed()
        is_last = len(unconfirmed) >= trials_left and len(self._study.tried) > 1  # one guess goes before all that
        if unconfirmed and (is_last or self._study.settled()):
            return self._ask_for(unconfirmed[0], promise)
        for _ in range(_PATIENCE if self._space.distributions else 0):
            trial = self._study.ask(self._space.distributions)
            settings = self._space.settings(trial.params)
            if self._is_new(settings):
                return self._begin(trial, settings, promise(trial.params))
            self._study.skip(trial, self._measured(settings) or self._witness(settings))
        left = self._searched.shuffled(f"{self._study.record.seed}:{len(self._study.tried)}")
        of_part = (settings for settings in left if self._part != "changed" or settings.affect("function"))
        found = next(filter(self._is_new, of_part), None)
        if found is not None:
            return self._ask_for(found, promise)
        if self._part == "all":
            return None
        self.take("all")
        return self.next(trials_left)

    def settled(self) -> str | None:
        """Why the sampler stops, in words; None where it does not, or where something is still to be asked again or
        confirmed. Where nothing is chosen, the sampler cannot tell the space's only configuration from the reference:
        :meth:`next` ends that."""
        waiting = any(map(self._is_new, (*self._study.lost, *self._start))) or self._new_unconfirmed()
        return self._study.settled() if self._space.distributions and not waiting else None

    def finish(self, proposal: Proposal) -> None:
        """Note that a proposal has ended."""
        self._in_flight.discard(proposal.settings.canonical())

    def fell(self, row: Tried) -> None:
        """Tell the sampler that a configuration is disqualified: it could not be used when it was measured again."""
        params = self._space.params(row.settings)
        if params:
            self._study.skip(self._study.ask(self._space.distributions, params), row)

    def _new_unconfirmed(self) -> list[Settings]:
        return [settings for settings in self._unconfirmed() if self._is_new(settings)]

    def _guesses(self) -> Iterator[Point]:
        """First guesses, where not everything is predicted. None of what changes the function: most of it at once is
        seldom good enough."""
        first = self._samplers.get("same", self._samplers.get("all"))
        if first is None or self._part == "changed" or first[1].configurations.are_predicted:
            return iter(())
        return self._promising(first[0].choices)

    def _promising(self, choices: Mapping[str, tuple[Technique, ...]]) -> Iterator[Point]:
        """Before the sampler: for each technique its most promising choice, with the largest batch that
        fits, found by bisection. Then the same with techniques that trade time for memory, if the first guess did not
        fit even with the reference's own batch."""
        for with_trades in (False, True):
            rows = {name: [one for one in row if with_trades or not one.trades_time] for name, row in choices.items()}
            promising = {name: self._most_promising(row) for name, row in rows.items() if name != "batch" and row}
            yield promising
            first = self._measured(self._space.resolved(promising))
            if first is None or not first.verdict.over_memory:
                return
            yield from self._bisect(promising)

    def _most_promising(self, choices: Sequence[Technique]) -> Technique:
        """A technique's first alternative to its default; the default where that is expected to be faster. An
        alternative that trades time for memory counts whatever its speed."""
        first, *others = choices
        if not others or others[0].trades_time:
            return others[0] if others else first
        stated = self._study.record.facts.precision
        settings = (self._reference.having(one).in_force(stated) for one in (first, others[0]))
        gains = [one.prior_gains().get(first.name, (0.0, 0.0)) for one in settings]
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
        """A trial that could not be used and proves that ``settings`` cannot either: they compute the same function,
        whose quality is too low, or need at least as much memory. Or one that says the same of its loader's workers.

        The proof of memory holds between configurations that are equal in everything but the batch. With a larger
        micro-batch every activation grows and nothing shrinks, unless accumulation ends: only then are there no
        gradients of earlier micro-batches beside the activations, so that a split batch proves nothing about a whole
        one.
        """
        judged = self._study.judged(settings)
        if judged is not None and judged.verdict.constraints[CONSTRAINTS.index("quality")] > 0:
            return judged
        batch = settings.batch
        if batch is None:
            return self._loaders.witness(settings)
        for row in self._study.tried:
            tried = row.settings.batch
            if tried is None or not row.verdict.over_memory or tried.micro >= batch.micro:
                continue
            if tried.packed != batch.packed:  # a row is as long as its samples, a padded batch as its longest
                continue
            same = row.settings.model_copy(update={"batch": batch}) == settings
            if same and (tried.accumulate == 1 or batch.accumulate > 1):
                return row
        return self._loaders.witness(settings)

    def _ask_for(self, settings: Settings, promise: Promise = lambda params: None) -> Proposal:
        params = self._space.params(settings)  # None outside the space: the trial is told to nobody
        trial = self._study.ask(self._space.distributions if params else {}, params or {})
        return self._begin(trial, settings, promise(params or {}))

    def _begin(self, trial: optuna.Trial, settings: Settings, promise: float | None) -> Proposal:
        self._in_flight.add(settings.canonical())
        return Proposal(trial, self._study.begin(trial, settings), settings, promise)


def _nothing() -> Iterator[Any]:
    return iter(())


def build_sampler(name: Literal["tpe", "gp", "random"], seed: int, num_asked: int) -> BaseSampler:
    """One of Optuna's samplers.

    It is not stored with a study, and the same seed after a resume would suggest the same points again: so the number
    of trials that there are goes into it.
    """
    mixed = random.Random(f"{seed}:{num_asked}").getrandbits(32)
    if name == "random":
        return optuna.samplers.RandomSampler(seed=mixed)
    if name == "gp":
        import torch

        torch.set_num_threads(1)  # the fits are small, and the other threads belong to the trials
        return optuna.samplers.GPSampler(seed=mixed, n_startup_trials=_NUM_STARTUP)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # multivariate
        return optuna.samplers.TPESampler(seed=mixed, n_startup_trials=_NUM_STARTUP, multivariate=True)
