"""``judge``: one process in which candidates and the job as it stands recover and are evaluated, from all seeds."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import Any, Literal

from torch import nn
from torch.utils.data import IterableDataset

from ...errors import Caught, PlanError
from ...plan import Plan
from ...randomness import Randomness
from ...task import Task
from ...techniques import Settings
from ...techniques.models.pruning import Pruning
from ...training.apply_plan import apply, build_model
from ...training.training import Training
from ..checks.distill import build_teacher, distilled
from ..checks.quality import Recovery, keep_weights
from ..measurement import Quality
from ..profiling.profile import profile
from ..profiling.types import ProfileOptions
from ..timing.disturbance import one_thread
from .choose import Standing, between, going_on, halfway, provable, ratios_for
from .kept import Kept
from .runner import Runner
from .scan import NEVER, RATIOS, Scan
from .types import RUNGS, Cuts, GroupRow, JudgedCut, JudgeOptions

_REFERENCE = -1
"""Its number among the candidates."""
_NUM_TIMED = 6
"""Steps of each by which step times are compared: the first warms up."""
_TOO_MUCH = 1.5
"""Allowed drops lost in the end, by which a cut is judged from no more seeds."""
_ENOUGH = 2
"""Cuts that are kept, after which no slower one is judged."""
_MOST_MORE, _APART = 4, 1.15
"""Cuts that are judged after all, or made, where what came to the end leaves room between; and the least ratio of step
times that does."""
_Place = Literal["kept", "failed", "left"]
"""Of a candidate: it came to the end and can be proven, or cannot, or ended before."""
_EARLY = RUNGS.index(1 / 4)


def judge(task: Task, plan: Plan, options: JudgeOptions, note: Callable[[str], None] = lambda doing: None) -> Cuts:
    """Judge candidates: all of them, or those that may be kept.

    What one candidate raises ends that one alone.

    Args:
        task: has ``evaluate``.
        plan: the job as it stands.
        options: what is judged, and how.
        note: is told what is done next.

    Raises:
        Exception: whatever the user's code raises as the job as it stands is trained or evaluated.
    """
    return _Judge(_read_once(task), plan, options, note).run()


def _read_once(task: Task) -> Task:
    """The same task, whose data and weights are read once."""
    if task.build_loader is None and not isinstance(dataset := task.build_dataset(), IterableDataset):
        task = replace(task, build_dataset=lambda: dataset)
    if task.weights is not None:
        model = build_model(task)
        task = replace(task, build_model=lambda: copy.deepcopy(model), weights=None)
    return task


def _begun(settings: Settings, pruning: Pruning | PlanError) -> JudgedCut:
    """A candidate with the record of its cut, or why there is none."""
    if isinstance(pruning, PlanError):
        return JudgedCut(settings=settings, ended=str(pruning))
    return JudgedCut(settings=settings.having(pruning))


class _OutOfTime(Exception):
    """Nothing more is begun."""


class _Judge:
    def __init__(self, task: Task, plan: Plan, options: JudgeOptions, note: Callable[[str], None]) -> None:
        self._task, self._plan, self._options, self._note = task, plan, options, note
        self._began_s = time.monotonic()
        self._kept = Kept(options)
        self._found = self._kept.found or Cuts(
            reference=JudgedCut(settings=plan.settings, qualities=options.reference),
            cuts=tuple(JudgedCut(settings=one) for one in options.candidates),
        )
        self._running: dict[int, Runner] = {}
        """From the first seed, those that are not at an end."""
        self._peaks: dict[int, int] = {}
        self._teacher: nn.Module | None = build_teacher(task) if options.recovery.distill else None

    def run(self) -> Cuts:
        if self._options.targets and not self._found.is_scanned:
            with Caught() as raised:
                self._scan()
            if raised.error is not None:  # candidates that cannot be had will say so themselves
                self._say(f"all groups of channels are cut alike: they cannot be told apart: {raised.error}")
        numbers = [n for n in range(len(self._found.cuts)) if self._cut(n).ended is None]
        try:
            if self._options.allowed is None:
                self._able([_REFERENCE, *numbers], self._come_to_the_end)
            else:
                self._find_front(numbers)
        except _OutOfTime:
            self._say("the time for judging cuts was up before all of them were judged")
        return self._found

    def _scan(self) -> None:
        """Find cuts whose ratios differ by group, alone and with the first low rank of the candidates: they take the
        place of pairs in which all groups are cut alike."""
        self._note("finding groups of channels")
        reference, candidates = self._plan.settings, self._options.candidates
        scan = Scan(self._task, self._plan, self._options.seeds[0], self._options.by_bytes)
        self._note(f"cutting each of {len(scan.groups)} groups alone")
        rows, layers = scan.rows(self._found.groups, self._keep_row)
        rises = {row.first: [*zip(RATIOS, row.rises, strict=True)] for row in rows if row.rises[0] < NEVER}
        able = [replace(one, groups=tuple(name for name in one.groups if name in rises)) for one in layers]
        ratios = ratios_for(self._options.targets, able, rises)
        found = [Pruning(kind="structured", ratios=tuple(one.items())) for one in ratios]
        ranks = [one.low_rank for one in candidates if one.low_rank != reference.low_rank][:1]
        every = [one for one in candidates if reference.pruning == one.pruning or reference.low_rank == one.low_rank]
        every += [reference.having(one, *beside) for one in found for beside in ([], ranks)[: 1 + len(ranks)]]
        asked = list(dict.fromkeys(one.pruning for one in every if one.pruning.runs_model))
        recorded = dict(zip(asked, scan.recorded(asked), strict=True))
        cuts = [_begun(one, recorded.get(one.pruning, one.pruning)) for one in every]
        first: dict[Any, JudgedCut] = {}
        for number, cut in enumerate(cuts):
            first.setdefault((cut.settings.pruning.record or number, cut.settings.low_rank), cut)
        self._found = self._found.model_copy(update={"cuts": tuple(first.values()), "is_scanned": True})
        self._kept.write(self._found)

    def _keep_row(self, row: GroupRow) -> None:
        self._found = self._found.model_copy(update={"groups": (*self._found.groups, row)})
        self._kept.write(self._found)

    def _say(self, *notes: str) -> None:
        self._found = self._found.model_copy(update={"notes": (*self._found.notes, *notes)})

    def _find_front(self, numbers: list[int]) -> None:
        """Judge what is worth most first, until two that are kept are faster; where what came to the end leaves room
        between, what ended before too."""
        numbers = self._time(self._able(numbers, self._runner))
        self._come_to(_REFERENCE, len(RUNGS) - 2)
        self._come_to_the_end(_REFERENCE, 1)
        rung = len(RUNGS) - 2
        finalists = [Standing(n, self._cut(n).cost, self._lost(n, rung)) for n in self._halved(numbers)]
        for one in sorted(finalists, key=lambda one: -one.worth):  # what may come last may have no time left
            if sum(kept.step <= one.step for kept in self._standings()["kept"]) < _ENOUGH:
                self._able([one.number], self._come_to_the_end)
            else:
                self._end(one.number, "slower than others that are kept")
        for _ in range(_MOST_MORE):
            standings = self._standings()
            if (found := between(**standings)) is None and (found := self._halfway(standings)) is None:
                return
            self._keep(found, ended=None)
            self._able([found], self._come_to_the_end)

    def _halfway(self, standings: Mapping[_Place, Sequence[Standing]]) -> int | None:
        """Begin a cut between the fastest that is kept, or the job as it stands, and the next faster one that is not;
        its number, None where there is none."""
        kept = min(standings["kept"], key=lambda one: one.step, default=Standing(_REFERENCE, 1.0, 0.0))
        faster = [one for one in standings["failed"] if one.step * _APART < kept.step and self._ratios(one.number)]
        if not faster:
            return None
        failed = self._ratios(max(faster, key=lambda one: one.step).number)
        own = dict.fromkeys(failed, 0.0) if kept.number == _REFERENCE else self._ratios(kept.number)
        if (ratios := halfway(failed, own)) is None:
            return None
        pruning = Pruning(kind="structured", ratios=tuple(ratios.items()))
        if any(cut.settings.pruning.ratios == pruning.ratios for cut in self._found.cuts):
            return None
        number, cut = len(self._found.cuts), JudgedCut(settings=self._plan.settings.having(pruning))
        self._found = self._found.model_copy(update={"cuts": (*self._found.cuts, cut)})
        self._time(self._able([number], self._runner))
        return number if self._cut(number).ended is None else None

    def _ratios(self, number: int) -> dict[str, float]:
        """Of a cut's groups; none where it is no cut of channels alone."""
        settings = self._cut(number).settings
        if settings.having(self._plan.settings.pruning) != self._plan.settings:
            return {}
        own = settings.pruning
        return dict(own.ratios) if own.ratios is not None else {row.first: own.ratio for row in self._found.groups}

    def _halved(self, numbers: list[int]) -> list[int]:
        """Those that come to the end."""
        for rung, share in [*enumerate(RUNGS[:-1])][self._found.num_halved :]:
            numbers = self._able(numbers, partial(self._come_to, rung=rung))
            rows = [Standing(n, self._cut(n).cost, self._lost(n, rung)) for n in numbers]
            numbers = going_on(rows, rung, self._options.most)
            self._found = self._found.model_copy(update={"num_halved": rung + 1})
            for row in rows:
                if row.number not in numbers:
                    self._end(row.number, f"{row.lost:.2g} of the allowed drop lost after {share:.3g} of the recovery")
        return numbers

    def _able(self, numbers: Sequence[int], do: Callable[[int], Any]) -> list[int]:
        """Candidates for which it could be done."""
        for number in numbers:
            with Caught(_OutOfTime, *((Exception,) if number == _REFERENCE else ())) as raised:
                do(number)
            if raised.error is not None:
                self._end(number, str(raised.error) or type(raised.error).__name__)
        return [n for n in numbers if n != _REFERENCE and self._cut(n).ended is None]

    def _standings(self) -> dict[_Place, list[Standing]]:
        """Of what came to the end, and of what ended before."""
        rows: dict[_Place, list[Standing]] = {"kept": [], "failed": [], "left": []}
        for number, cut in enumerate(self._found.cuts):
            if cut.qualities and cut.step is not None:
                lost, pairs = self._lost_in_the_end(number), self._pairs(number)
                allowed = self._allowed(fmean(other.value for _, other in pairs))
                rows["kept" if lost <= provable(pairs, allowed) else "failed"].append(Standing(number, cut.cost, lost))
            elif cut.rungs and cut.step is not None:
                rows["left"].append(Standing(number, cut.cost, self._lost(number, len(cut.rungs) - 1)))
        return rows

    def _lost_in_the_end(self, number: int) -> float:
        """Drop in quality over the allowed one, from all seeds so far."""
        pairs = self._pairs(number)
        return fmean(other.value - one.value for one, other in pairs) / self._allowed(
            fmean(other.value for _, other in pairs)
        )

    def _pairs(self, number: int) -> list[tuple[Quality, Quality]]:
        return [*zip(self._cut(number).qualities, self._found.reference.qualities, strict=False)]

    def _allowed(self, reference: float) -> float:
        allowed = (self._options.allowed or 0.0) * (abs(reference) if self._options.is_share else 1.0)
        return max(allowed, 1e-12)

    def _lost(self, number: int, rung: int) -> float:
        """Drop in quality over the allowed one, beyond what the job as it stands still gains itself: what was cut
        gains as much, since it has more to learn."""
        reference, end = self._found.reference.rungs[rung], self._found.reference.qualities[0].value
        return (reference - self._cut(number).rungs[rung] - max(end - reference, 0.0)) / self._allowed(end)

    def _runner(self, number: int) -> Runner:
        """From the first seed; anew where another process had begun it."""
        if number not in self._running:
            self._running[number] = self._begun(number, self._options.seeds[0])
            self._keep(number, settings=self._running[number].settings)
        return self._running[number]

    def _begun(self, number: int, seed: int) -> Runner:
        if self._options.most_s is not None and time.monotonic() - self._began_s > self._options.most_s:
            raise _OutOfTime
        with (random := Randomness(seed)):
            training = self._applied(number, seed)
            applied = training.settings
            if self._teacher is not None and number != _REFERENCE:
                training = distilled(training, self._task, self._teacher)
            recovery = Recovery(training, self._task, self._options.recovery)
        return Runner(recovery, applied, random)

    def _applied(self, number: int, seed: int) -> Training:
        settings = self._recorded(self._cut(number).settings)
        return apply(self._plan.model_copy(update={"settings": settings}), self._task, seed=seed, enforce=True)

    def _recorded(self, settings: Settings) -> Settings:
        """With the record of a cut that another candidate has made."""
        if self._found.is_scanned:
            return settings  # they have theirs
        for asked, found in zip(self._options.candidates, self._found.cuts, strict=False):
            for one in asked.techniques():
                if one.reads_values and one == getattr(settings, one.name):
                    settings = settings.having(getattr(found.settings, one.name))
        return settings

    def _time(self, numbers: list[int]) -> list[int]:
        """Compare step times, one step of each in its turn; those that could be."""
        left = [n for n in numbers if self._cut(n).step is None]
        self._note("timing steps")
        with one_thread():
            for _ in range(_NUM_TIMED if left else 0):
                left = self._able([_REFERENCE, *left], lambda number: self._runner(number).step())
        self._able(left, self._weigh)
        return [n for n in numbers if self._cut(n).ended is None]

    def _weigh(self, number: int) -> None:
        own, reference = (median(self._runner(one).seconds[1:]) for one in (number, _REFERENCE))
        peak = self._peak_bytes(number) / self._peak_bytes(_REFERENCE) if self._options.by_bytes else None
        self._keep(number, step=max(own / reference, 1e-6), peak=peak)

    def _peak_bytes(self, number: int) -> int:
        """Of tensors in a step."""
        if number not in self._peaks:
            with Randomness(self._options.seeds[0]):
                training = self._applied(number, self._options.seeds[0])
                self._peaks[number] = profile(training, self._task, ProfileOptions(num_timed_steps=0)).peak.num_bytes
        return self._peaks[number]

    def _come_to(self, number: int, rung: int) -> None:
        """Be judged at a rung and those before, from the first seed."""
        for at in range(len(self._cut(number).rungs), rung + 1):
            self._note(f"{self._name(number)} recovers, to {RUNGS[at]:.3g} of the steps")
            found = self._runner(number).until(RUNGS[at])
            self._keep(number, rungs=(*self._cut(number).rungs, found.value))

    def _come_to_the_end(self, number: int, most: int | None = None) -> None:
        """Be judged from all seeds, or the first few; the job as it stands beside each."""
        for place in range(len(self._cut(number).qualities), most or len(self._options.seeds)):
            if number != _REFERENCE:
                self._come_to_the_end(_REFERENCE, place + 1)
            began_s, seed = time.monotonic(), self._options.seeds[place]
            self._note(f"{self._name(number)} recovers, from seed {seed}")
            runner = self._begun(number, seed) if place else self._runner(number)
            is_first = number == _REFERENCE and place == 0
            early = self._early(runner) if is_first else None
            found = runner.until(1.0)
            noise = runner.recovery.look(found.value == early) if is_first and self._options.recovery.looks else None
            words, seconds = runner.recovery.words, time.monotonic() - began_s
            quality = Quality(**found._asdict(), early=early, noise=noise, recovered=words, seconds=seconds)
            if number == place == 0:
                self._say(*keep_weights(runner.recovery.training, self._options.recovery))
            self._keep(number, settings=runner.settings, qualities=(*self._cut(number).qualities, quality))
            self._running.pop(number, None)
            is_judged = self._options.allowed is not None and number != _REFERENCE
            if is_judged and (lost := self._lost_in_the_end(number)) > _TOO_MUCH:
                self._end(number, f"{lost:.2g} of the allowed drop lost in the end")
                return

    def _early(self, runner: Runner) -> float:
        """What the job as it stands comes to after a quarter, by which trials are given up early."""
        rungs = self._found.reference.rungs
        return rungs[_EARLY] if len(rungs) > _EARLY else runner.until(RUNGS[_EARLY]).value

    def _end(self, number: int, why: str) -> None:
        self._running.pop(number, None)
        self._keep(number, ended=why)

    def _name(self, number: int) -> str:
        return "the job as it stands" if number == _REFERENCE else f"cut {number + 1} of {len(self._found.cuts)}"

    def _cut(self, number: int) -> JudgedCut:
        return self._found.reference if number == _REFERENCE else self._found.cuts[number]

    def _keep(self, number: int, **update: Any) -> None:
        changed, cuts = self._cut(number).model_copy(update=update), self._found.cuts
        if number == _REFERENCE:
            self._found = self._found.model_copy(update={"reference": changed})
        else:
            self._found = self._found.model_copy(update={"cuts": (*cuts[:number], changed, *cuts[number + 1 :])})
        self._kept.write(self._found)
