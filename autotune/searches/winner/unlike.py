"""One training over unlike devices: a plan and a share for each type of them, from the studies of searches there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple, Self

from pydantic import ValidationError

from ...bundle import Bundle, Member, threads_words
from ...errors import Interrupted, NothingFits, UserError
from ...plan import Plan, TaskRef
from ...techniques import Facts, Settings
from ...techniques.batch import Batch, refused_split
from ...techniques.parallel import Parallel
from ...units import parse_bytes, size, slug
from ..store.read_study import Stored, read_study, url_of
from .build_plan import environment_of
from .shares import Timed, quickest, share_out

_ROUNDS = 3
"""Shares that are measured, at most, until they are even."""
MOST_PLANS = 2 * _ROUNDS
"""Plans that are measured on a type, at most: two for each share."""
_LOOK_S = 0.2
_EVEN = 0.02
"""Difference between the first and the last to finish, as a share of the first, that is left alone: speeds are known to
so much."""
_LOSSY = (
    "splitting a batch changes this model's gradient (BatchNorm in training, or a loss averaged over varying counts), "
    "so that unequal shares would not train what equal ones do. --allow-split permits it."
)


class Share(NamedTuple):
    """What a rank on one type of device takes of each optimizer step."""

    samples: int
    plan: Plan
    seconds: float
    """That it takes, without the exchange of gradients."""


@dataclass(frozen=True)
class SharedTraining:
    """One training over several types of devices, and what searches have measured on each."""

    studies: Sequence[Stored]
    """One for each type."""
    ranks: Sequence[int]
    """Processes on each type."""
    effective: int
    """Samples in an optimizer step, of all ranks."""
    allow_split: bool
    """Although a split batch's gradient is another."""
    timed: Sequence[Mapping[Timed, Settings]]
    """For each type, the fastest settings of each micro-batch, of those that fit."""

    @classmethod
    def read(
        cls, studies: Sequence[tuple[str, int]], effective_batch: int | None = None, allow_split: bool = False
    ) -> Self:
        """Read the studies.

        Args:
            studies: path or URL of each type's, and how many ranks on that type.
            effective_batch: samples in an optimizer step; None is what the studies held.
            allow_split: although a split batch's gradient is another.

        Raises:
            UserError: they are not of one task, or what they measured cannot be shared.
            StudyError: there is no such study.
        """
        ranks = [number for _, number in studies]
        found = [read_study(url_of(name)) for name, _ in studies]
        _check_one_task(found, allow_split)
        effective = effective_batch or found[0].record.facts.effective_batch
        check_ranks(sum(ranks), effective)
        row = _parallel(sum(ranks), effective)
        return cls(found, ranks, effective, allow_split, [_timed(study, row, effective) for study in found])

    def expected(self) -> list[Share]:
        """The share of each type, by what its micro-batches took in the searches.

        Raises:
            UserError: the batch cannot be shared out.
        """
        shares = []
        for number, samples in enumerate(self._counts([[*timed] for timed in self.timed])):
            one = quickest([*self.timed[number]], samples)
            seconds = one.seconds_for(samples)
            note = (
                f". Its micro-batch of {one.micro} was measured alone, in study {self.studies[number].name}, at "
                f"{one.micro / one.seconds:.4g} samples/s: {seconds:.4g} s are expected for the share, without the "
                "exchange of gradients"
            )
            shares.append(self._share(self._plan(number, samples, one), samples, seconds, note))
        return shares

    def even_out(self, measure: Callable[[int, Plan, int], float]) -> list[Share]:
        """The share of each type with which all finish together, by what the shares themselves take.

        The first are in proportion to each type's fastest trial; the next, as a small share may be slower for each
        sample, to what the last were measured at.

        Args:
            measure: seconds that one process alone takes, on a type, with a plan, for so many samples; infinite where
                that is over the budget. It is called for all types at once.

        Returns:
            Of the shares that were measured, those whose last rank finishes first.

        Raises:
            UserError: the batch cannot be shared out; or as ``measure``.
            NothingFits: the first shares are over the budget.
            Interrupted: as ``measure``, before any shares were measured.
        """
        speeds = [max(one.micro / one.seconds for one in timed) for timed in self.timed]
        tried: dict[tuple[int, ...], list[Share]] = {}
        with ThreadPoolExecutor(len(speeds)) as pool:
            for _ in range(_ROUNDS):
                counts = tuple(self._counts([[Timed(1, 1 / speed)] for speed in speeds]))
                if counts in tried:
                    break
                asked = [pool.submit(self._quickest, measure, *each) for each in enumerate(counts)]
                while wait(asked, _LOOK_S).not_done:  # a signal is handled as a wait ends
                    pass
                try:
                    shares = [each.result() for each in asked]
                except (Interrupted, NothingFits):
                    if tried:
                        break
                    raise
                tried[counts] = shares
                if _last(shares) <= (1 + _EVEN) * min(one.seconds for one in shares):
                    break
                speeds = [one.samples / one.seconds for one in shares]
        return min(tried.values(), key=_last)

    def bundle(self, shares: Sequence[Share]) -> Bundle:
        """The bundle of each type's share.

        Raises:
            UserError: two types cannot be told apart.
        """
        every = zip(self.studies, self.ranks, shares, strict=True)
        return _bundle(self.effective, (_member(study.record.facts, number, share) for study, number, share in every))

    def _counts(self, types: Sequence[Sequence[Timed]]) -> list[int]:
        """Samples for a rank on each type, by what its micro-batches take."""
        try:
            return share_out(types, self.effective, self.ranks)
        except ValueError as reason:
            raise UserError(f"{reason}. Choose another --effective-batch.") from None

    def _quickest(self, measure: Callable[[int, Plan, int], float], number: int, samples: int) -> Share:
        """A type's share, measured with the settings that are the fastest in whole micro-batches, and with those that
        are the fastest for each sample: a part of a micro-batch takes something in between."""
        timed = self.timed[number]
        ones = quickest([*timed], samples), min(timed, key=lambda one: one.seconds / one.micro)
        plans = {plan.settings: plan for plan in (self._plan(number, samples, one) for one in ones)}
        took_s = {settings: measure(number, plan, samples) for settings, plan in plans.items()}
        best = min(took_s, key=lambda settings: took_s[settings])
        if took_s[best] == math.inf:
            raise NothingFits(
                f"{self.studies[number].where}: a share of {samples} samples is over the budget, although its "
                f"micro-batch of {ones[0].micro} was within it. Give a larger --margin."
            )
        note = f", for which one process alone took {took_s[best]:.4g} s, without exchanging gradients"
        return self._share(plans[best], samples, took_s[best], note)

    def _share(self, plan: Plan, samples: int, seconds: float, note: str) -> Share:
        notes = (f"a share of {samples} of {self.effective} samples{note}", *plan.notes)
        return Share(samples, plan.model_copy(update={"notes": notes}), seconds)

    def _plan(self, number: int, samples: int, one: Timed) -> Plan:
        """A type's plan for so many samples, in one of its micro-batches.

        Raises:
            UserError: a split batch's gradient is another, and nobody allowed that.
        """
        study = self.studies[number]
        facts, batch = study.record.facts, Batch.of(samples, one.micro)
        lossy = Batch.of(facts.effective_batch, batch.micro).exactness(facts) == "lossy"
        if lossy and not (self.allow_split or facts.allow_split):
            raise UserError(f"{study.where}: {_LOSSY}")
        row = _parallel(sum(self.ranks), self.effective)
        chosen = self.timed[number][one].in_force(facts.precision)
        settings = chosen.having(batch, row)
        return Plan(
            task=TaskRef(source=study.record.task, fingerprint=facts.fingerprint, identity=facts.identity),
            budget=study.record.budget,
            settings=settings,
            exactness={each.name: each.exactness(facts) for each in settings.chosen()},
            notes=("batch is lossy for this model: it changes the gradient, not only its rounding",) if lossy else (),
            environment=environment_of(facts),
        )


def check_apart(known: Sequence[Facts]) -> None:
    """Refuse types of devices of which no process could tell which it is on.

    Args:
        known: of one task, as each type's inspection found it.

    Raises:
        UserError: so they are.
    """
    _bundle(len(known), (_member(facts, 1, Share(1, Plan(settings=Settings()), 1.0)) for facts in known))


def _bundle(effective: int, members: Iterable[Member]) -> Bundle:
    try:
        return Bundle(effective=effective, plans=tuple(members))
    except ValidationError as error:
        raise UserError(f"{error.errors()[0]['msg'].removeprefix('Value error, ')}.") from None


def _member(facts: Facts, ranks: int, share: Share) -> Member:
    """A bundle's row, with a type's memory as people read it."""
    return Member(
        plan=_file_name(facts),
        type=facts.device.type,
        device=facts.device.name,
        memory=parse_bytes(size(facts.device.memory_bytes)),
        threads=facts.num_threads if facts.device.type == "cpu" else None,
        ranks=ranks,
        samples=share.samples,
        step_s=round(share.seconds, 6),
    )


def _last(shares: Sequence[Share]) -> float:
    """Seconds until the last is done."""
    return max(one.seconds for one in shares)


def check_shareable(facts: Facts, where: str, allow_split: bool) -> None:
    """Refuse a task whose optimizer steps cannot be shared out.

    Args:
        facts: of the task.
        where: what the message begins with.
        allow_split: although a split batch's gradient is another.

    Raises:
        UserError: so it is.
    """
    if facts.dataset_kind == "iterable":
        raise UserError(f"{where}: an iterable dataset, or a loader of the task's own, cannot be shared out.")
    if facts.micro_batch is None and not allow_split and refused_split(facts) is not None:
        raise UserError(f"{where}: {_LOSSY}")


def check_ranks(num_ranks: int, effective: int) -> None:
    """Refuse ranks that do not have a sample each, or one alone.

    Raises:
        UserError: so it is.
    """
    if not 2 <= num_ranks <= effective:
        raise UserError(
            f"{effective} samples of an optimizer step are to be shared by 2 ranks or more, each with one or more, but "
            f"got {num_ranks}. Say how many ranks each type of device has: "
            "`autotune search --devices cuda:A100*2,…`."
        )


def _file_name(facts: Facts) -> str:
    """``nvidia-h100-80gb-hbm3-79.65-gib.yaml``: of a type of device."""
    parts = [facts.device.name, size(facts.device.memory_bytes)]
    parts += [threads_words(facts.num_threads)] if facts.device.type == "cpu" else []
    return slug(" ".join(parts)) + ".yaml"


def _parallel(num_ranks: int, effective: int) -> Parallel:
    """The row of every plan."""
    return Parallel(kind="ddp", processes=num_ranks, effective=effective)


def _check_one_task(studies: Sequence[Stored], allow_split: bool) -> None:
    """Refuse studies of several tasks, or of one that cannot be shared.

    Raises:
        UserError: so they are.
    """
    first = studies[0].record.facts
    for study in studies:
        facts, where = study.record.facts, f"{study.where}: study {study.name}"
        if facts.fingerprint != first.fingerprint or study.record.task != studies[0].record.task:
            raise UserError(f"{where} is of another task than {studies[0].where}. Name studies of one task.")
        if study.record.command is not None:
            raise UserError(f"{where} is of a script, whose gradients are its own to weight. Write a task file for it.")
        check_shareable(facts, where, allow_split)
        if facts.effective_batch != first.effective_batch:
            raise UserError(
                f"{where} held a batch of {facts.effective_batch}, and {studies[0].where} one of "
                f"{first.effective_batch}. Search again with one --effective-batch."
            )


def _timed(study: Stored, row: Parallel, effective: int) -> dict[Timed, Settings]:
    """What was measured and fits: the fastest settings of each micro-batch.

    Raises:
        UserError: nothing.
    """
    found: dict[int, tuple[float, Settings]] = {}
    for tried in study.tried:
        settings, speed = tried.applied, tried.verdict.log_speed
        if not tried.verdict.feasible or tried.number in study.fallen or speed is None or settings.batch is None:
            continue
        micro = min(settings.batch.micro, effective)
        joined = settings.having(row, Batch(micro=micro))
        if settings.parallel.kind != "none" or settings.affect("function") or joined.conflict() is not None:
            continue
        seconds = settings.batch.micro / math.exp(speed)
        if micro not in found or seconds < found[micro][0]:
            found[micro] = seconds, settings
    if not found:
        raise UserError(f"{study.where}: no trial of study {study.name} fits and may be shared. Search further.")
    return {Timed(micro, seconds): settings for micro, (seconds, settings) in found.items()}
