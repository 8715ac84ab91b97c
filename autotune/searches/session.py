"""One running search: the state that its phases share, how it makes requests, and what it takes over from others."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ..files import FOLDER
from ..measure.cuts.types import JudgedCut
from ..measure.measurement import OUT, Parity, Quality, QualityOptions
from ..plan import Budget, Evidence
from ..techniques import Facts, Settings
from ..workers import STOPPED, Compared, Executor, Measured, MeasureRequest, Outcome
from .event_base import Event
from .events import SecondsKnown, TrialEnded, Warned
from .options import SearchOptions
from .requests import PARITY_LIMITS, Requests, exactness, reference_settings
from .sampler.candidates import Candidates, Proposal
from .sampler.configuration_space import Foreseen
from .seconds import Seconds
from .store.study import SPENT, Study
from .store.tried import Tried
from .time_budget import TimeBudget
from .verdict import Verdict, least_early

OUTPUTS = "reference-outputs"
"""Under which the study has the run of :func:`~autotune.searches.trials.take_outputs`."""
Pairs = Sequence[tuple[Quality, Quality]]
"""A configuration's quality and the reference's, seed by seed."""


class Known(Protocol):
    """Measurements of a task by other searches, on the same device and under the same conditions."""

    shares_rounds: bool
    """Finalists' first rounds are other searches', too, which run beside this one: so that they are no turns."""

    def reference(self, session: Session) -> Outcome | None:
        """The outcome of the job as it stands; None where it has to be measured."""

    def others(self, session: Session) -> Iterable[tuple[Settings, Outcome]]:
        """Of other configurations, what says something within this search's budget, which is in bytes by now."""

    def again(self, session: Session, settings: Settings, finalist_round: int) -> Outcome | None:
        """The outcome of one more run of a finalist; None where it has to be measured."""


@dataclass
class Session:
    """A search that is under way."""

    options: SearchOptions
    executor: Executor
    observe: Callable[[Event], None]
    stop: threading.Event
    time_budget: TimeBudget
    study: Study
    facts: Facts
    known: Known | None = None
    """What other searches have measured of the task."""
    foreseen: Foreseen = field(default_factory=Foreseen)
    """What is predicted of configurations."""
    no_cut: str | None = None
    """Why no cut of the model is worth a trial; None where one is, or none was judged."""
    _task: str = field(default="", init=False)
    _folder: str = field(default="", init=False)
    _judged: Mapping[Settings, Pairs] = field(default_factory=dict, init=False)
    _alike: set[Settings] = field(default_factory=set, init=False)
    """Functions that were told to have the whole model's scores."""
    _said: set[str] = field(default_factory=set, init=False)
    _earlier_s: float = field(default=0.0, init=False)
    _seconds: Seconds = field(init=False)

    def __post_init__(self) -> None:
        """Take over what an earlier process learned."""
        self._task = os.path.abspath(self.options.task)  # while there is a current folder
        self._folder = os.path.abspath(FOLDER)
        read_s = self.time_budget.read_s
        started_s = max(self.time_budget.elapsed_s() - read_s, 0.0)
        self._seconds = Seconds(started_s, read_s, self.study.kept(SPENT))
        for row in self.study.tried:
            self._earlier_s += 0.0 if row.known else row.outcome.seconds
            self.time_budget.learn(row.outcome, fresh=False)

    @property
    def budget(self) -> Budget:
        """The budget; in bytes once the reference's peak is known, where it is a share of that."""
        return self.study.record.budget

    def budget_of(self, number: int) -> Budget:
        """The budget that a trial is held to, by its number."""
        return self.budget if number else self.budget.of_job()

    @property
    def requests(self) -> Requests:
        """Makes the requests."""
        options, known = self.options, self._known()
        return Requests(
            self._task,
            options.seed,
            self.budget,
            self.facts,
            options.command,
            options.scratch,
            known,
            options.life,
            options.tolerance,
            options.max_quality_drop if options.inference else None,
        )

    def _known(self) -> Evidence | None:
        """Of the job as it stands, or of the first trial that was measured; None until then, and on a CPU."""
        first = self.study.first_measured
        if first is None or not isinstance(first.outcome, Measured):
            return None
        found = first.outcome.measurement
        return Evidence(samples_per_s=found.samples_per_s, peak=found.peak) if found.peak.reserved is not None else None

    @property
    def reference_settings(self) -> Settings:
        """The user's job as it stands."""
        return reference_settings(self.facts)

    @property
    def reference(self) -> Tried | None:
        """Trial 0, once it has been measured."""
        return next((row for row in self.study.tried if row.number == 0), None)

    @property
    def is_tight(self) -> bool:
        """Whether the job as it stands does not fit on its device."""
        verdict = self.reference.verdict if self.reference is not None else None
        return verdict is not None and verdict.over_memory and not verdict.of_host

    @property
    def feasible(self) -> list[Tried]:
        """Usable configurations, fastest first."""
        return self.study.feasible

    def seconds(self) -> float:
        """Wall time of the search so far, earlier processes' trials included."""
        return self._earlier_s + self.time_budget.elapsed_s()

    def request(
        self,
        name: str,
        settings: Settings,
        share_s: float,
        finalist_round: int | None = None,
        judged: bool = False,
        compares: bool | None = None,
    ) -> MeasureRequest:
        """A request to measure a configuration. The reference is not held to the budget.

        Args:
            name: of the request.
            settings: what is measured.
            share_s: seconds of timed windows.
            finalist_round: None for a trial. From 1 on it runs in an interpreter of its own.
            judged: measure quality too, from a seed of this round's own.
            compares: whether losses are compared with the reference's; None is in a trial, as a job does not.
        """
        is_reference = settings == self.reference_settings
        measure = self.requests.measure_options(settings, share_s, self.reference_parity, enforce=not is_reference)
        measure = measure.model_copy(
            update={"plain_loop": is_reference and not self.facts.inference, "may_be_unsure": not finalist_round}
        )
        if not (finalist_round is None if compares is None else compares):
            measure = measure.model_copy(update={"parity_batch": None})
        elif self.not_comparable or self._groups_otherwise(settings):
            measure = measure.model_copy(update={"sums_only": True})
        spares = finalist_round is None and not is_reference
        deadline_s = self.time_budget.deadline_s(share_s, spares)
        if judged:
            quality = self.quality_options(is_reference, finalist_round or 0)
            if self.options.keep_weights and finalist_round == 1 and not is_reference:
                quality = quality.model_copy(update={"keep": str(self.weights_file(name))})
            measure = measure.model_copy(update={"quality": quality})
        request = self.requests.request(name, settings, measure, deadline_s)
        request = request.with_deadline(deadline_s, self.time_budget.room_s(spares))
        seed = request.seed + (finalist_round or 0) * judged
        return request.model_copy(update={"fresh": bool(finalist_round), "seed": seed})

    def _groups_otherwise(self, settings: Settings) -> bool:
        """Whether an optimizer step sees other samples than the reference's: batches of other tokens have others."""
        return self.facts.token_flag is not None and settings.batch != self.reference_settings.batch

    def to_beat(self, settings: Settings) -> float | None:
        """Samples per second of the fastest so far, as it would run now; None while nothing can be used, or there are
        no losses to compare with. What computes what the job does is held against its like alone: the quality of
        others is proven in the end, or not."""
        changes = settings.affect("function")
        best = next((row for row in self.feasible if changes or not row.settings.affect("function")), None)
        if best is None or self.reference_parity is None or not self.study.paces.of(best.number).is_sure:
            return None
        return math.exp(self.study.log_speed(best) - self.study.paces.shift)

    def lacks_comparison(self, row: Tried) -> bool:
        """Whether a trial ended before its losses were compared, since it was surely slower than another or over the
        budget."""
        if not isinstance(row.outcome, Measured) or row.number == 0 or row.settings.affect("function"):
            return False
        return row.outcome.measurement.stopped in OUT and row.outcome.measurement.parity.compared is None

    def quality_options(self, is_reference: bool, number: int = 0) -> QualityOptions:
        """How quality is measured; trials with the reference's seed are given up early if they fall too far behind
        it."""
        known, drop = self.study.reference_quality, self.options.max_quality_drop
        least = least_early(known, drop) if known and drop and not is_reference and number == 0 else None
        options = self.options
        return QualityOptions(
            num_samples=options.recovery_steps * self.facts.effective_batch,
            least_early=least,
            lr_factor=options.recovery_lr,
            looks=is_reference and number == 0,
            distill=options.distill,
        )

    @property
    def cuts_file(self) -> Path:
        """What a process that judges cuts has found so far; absolute."""
        return Path(self._folder, self.study.name, "cuts.json")

    def take_judged(self, cuts: Mapping[Settings, Pairs], reference: JudgedCut) -> None:
        """Take over what is known of the quality of functions: their trials are not judged again."""
        own = reference.qualities
        self._judged = {**cuts, Settings(): [*zip(own, own, strict=True)]}

    def judged(self, settings: Settings) -> Pairs:
        """Qualities of what a configuration computes, with the reference's, seed by seed; none where it was not
        judged."""
        return self._judged.get(settings.part("function"), ())

    def with_quality(self, settings: Settings, outcome: Outcome) -> Outcome:
        """The outcome of a trial, with the quality that is known of what it computes, from the trial's seed."""
        pairs = self.judged(settings)
        if not pairs or not isinstance(outcome, Measured) or outcome.measurement.quality is not None:
            return outcome
        quality = pairs[0][0].model_copy(update={"seconds": 0.0})  # not of this trial's
        measurement = outcome.measurement.model_copy(update={"quality": quality})
        return outcome.model_copy(update={"measurement": measurement})

    def weights_file(self, name: str) -> Path:
        """Where what a request's recovery made of the model is kept; absolute."""
        return Path(self._folder, self.study.name, f"{name}.pt")

    @property
    def not_comparable(self) -> str | None:
        """Why losses are not compared with the reference's: a script's runs may differ by themselves, as its first
        steps tell, or those of a second run of it as it stands."""
        first, parity = self.facts.first_losses, self.reference_parity
        if self.options.command is None or self.facts.not_comparable is not None:
            return self.facts.not_comparable
        scale = sum(map(abs, first)) / len(first) if first else 1.0
        for step, (loss, again) in enumerate(zip(first, parity.losses if parity else (), strict=False), 1):
            if abs(loss - again) > PARITY_LIMITS["exact"] * step * (scale or 1.0):
                return f"two runs of it as it stands differ, by {abs(loss - again) / (scale or 1.0):.1%} at step {step}"
        return None

    def learn(self, name: str, outcome: Outcome, fresh: bool = False) -> None:
        """Keep a trial's whole output, pass on its warnings, and learn what it cost."""
        self.time_budget.learn(outcome, fresh)
        self._seconds.learn(name, outcome)
        sides = {name: outcome}
        if isinstance(outcome, Compared):
            others = {f"{name}-reference": outcome.other} if outcome.other is not None else {}
            sides = {name: outcome.one, **others}
        for each, one in sides.items():
            self.keep_output(each, one)
            for message in one.measurement.warnings if isinstance(one, Measured) else ():
                self.warn(message)

    def tell_alike(self, name: str, settings: Settings, outcome: Outcome) -> None:
        """Warn once of what computes something else than the whole model, and has its score in each example."""
        function = settings.part("function")
        if not settings.affect("function") or function in self._alike:
            return
        quality = outcome.measurement.quality if isinstance(outcome, Measured) else None
        whole = self.study.reference_quality
        if quality is None or whole is None or quality is whole or quality.scores is None:
            return
        if (quality.value, quality.scores) == (whole.value, whole.scores):
            self._alike.add(function)
            self.warn(
                f"{name}: every example has the same score as with the whole model. Does evaluate look at the model "
                "that it is given, and are its scores fine enough to tell?"
            )

    def tell_seconds(self) -> None:
        """Keep where the seconds went, so that ``--resume`` adds to it, and tell."""
        spent = self._seconds.spent(self.time_budget.elapsed_s())
        self.study.keep(SPENT, spent)
        self.observe(SecondsKnown(spent))

    def judge(self, outcome: Outcome, is_reference: bool = False) -> Verdict:
        """The verdict on an outcome."""
        return self.study.judge(outcome, is_reference)

    def warn(self, message: str) -> None:
        """Give a warning once."""
        if message not in self._said:
            self._said.add(message)
            self.observe(Warned(message))

    def was_cut_off(self, outcome: Outcome) -> bool:
        """Whether a trial ended because the user's second Ctrl-C closed the executor: that is no result."""
        return outcome == STOPPED

    def keep_output(self, name: str, outcome: Outcome) -> None:
        """Write what a process of the task's printed, and why it failed, into ``<name>.log`` in the study's folder."""
        why = getattr(outcome, "traceback", "") or getattr(outcome, "message", "")
        text = "".join(f"{part.rstrip()}\n" for part in (outcome.output, why) if part.strip())
        if not text or self.was_cut_off(outcome):
            return
        folder = FOLDER / self.study.name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.log").write_text(text, encoding="utf-8")
        except OSError as reason:
            self.warn(f"{folder}: the trials' output cannot be kept: {reason.strerror}.")
            return
        self.warn(
            f"what the task prints, and why a trial failed, is kept in {folder}/*.log; "
            "--verbose shows prints as each trial ends."
        )

    @property
    def reference_parity(self) -> Parity | None:
        """The reference's losses, or outputs; where it was never measured, those of the first exact configuration that
        was."""
        for row in self.study.tried:
            if isinstance(row.outcome, Measured) and (
                row.number == 0 or (exactness(row.settings, self.facts) == "exact" and not self.lacks_comparison(row))
            ):
                return row.outcome.measurement.parity
            if row.number == 0 and isinstance(found := self.study.evidence(OUTPUTS), Measured):
                return found.measurement.parity
        return None


def take_reference(session: Session, candidates: Candidates) -> None:
    """Take over the reference's outcome, if other searches have measured it: a search begins with what they have, which
    does not count as its trials."""
    outcome = session.known.reference(session) if session.known is not None else None
    if outcome is not None:
        _take(session, candidates, candidates.reference(), outcome)


def take_others(session: Session, candidates: Candidates) -> None:
    """Take over every other outcome that they have."""
    if session.known is None or session.reference is None or session.stop.is_set():
        return
    for settings, outcome in session.known.others(session):
        if (proposal := candidates.known(settings)) is not None:
            _take(session, candidates, proposal, outcome)
    taken = sum(row.known for row in session.study.tried)
    if taken and not session.known.shares_rounds:
        session.warn(
            f"{taken} measurements of earlier searches of this job are taken over: one was measured again, and agrees. "
            "--fresh measures everything anew."
        )


def _take(session: Session, candidates: Candidates, proposal: Proposal, outcome: Outcome) -> None:
    candidates.finish(proposal)
    best = session.feasible[:1]
    number, settings = proposal.number, proposal.settings
    tried = session.study.finish(proposal.trial, number, settings, outcome, known=True)
    session.time_budget.learn(outcome, fresh=False)
    is_best = session.feasible[:1] != best
    session.observe(TrialEnded(number, settings, outcome, tried.verdict.feasible, is_best, is_known=True))
