"""``judge``: one process in which candidates and the job as it stands recover and are evaluated, from all seeds."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from ...errors import Caught
from ...plan import Plan
from ...randomness import Randomness
from ...task import Task
from ...techniques import Settings
from ...training.apply_plan import apply, build_model
from ..checks.distill import build_teacher, distilled
from ..checks.quality import Recovery
from ..checks.scores import Judged
from ..measurement import Quality
from .choose import Standing, going_on
from .kept import Kept
from .types import RUNGS, Cuts, JudgedCut, JudgeOptions

_REFERENCE = -1
"""Its number among the candidates."""
_NUM_TIMED = 6
"""Steps of each by which step times are compared: the first warms up."""
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


@dataclass
class _Runner:
    """A training that recovers, with random numbers of its own, so that others may go on in between."""

    recovery: Recovery
    settings: Settings
    random: Randomness
    seconds: list[float] = field(default_factory=list)
    """Of steps: on a CPU the processor's, which other work does not change."""

    def step(self) -> None:
        """One step, timed."""
        device = self.recovery.training.device
        with self.random:
            began_s = _now(device)
            self.recovery.step()
            self.seconds.append(_now(device) - began_s)

    def until(self, share: float) -> Judged:
        """Train on until this share of the samples; what ``evaluate`` says then."""
        with self.random:
            self.recovery.until(share)
            return self.recovery.evaluate()


def _now(device: torch.device) -> float:
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


class _OutOfTime(Exception):
    """Nothing more is begun."""


class _Judge:
    def __init__(self, task: Task, plan: Plan, options: JudgeOptions, note: Callable[[str], None]) -> None:
        self._task, self._plan, self._options, self._note = task, plan, options, note
        self._began_s = time.monotonic()
        self._kept = Kept(options)
        self._found = self._kept.found or Cuts(
            reference=JudgedCut(settings=plan.settings),
            cuts=tuple(JudgedCut(settings=one) for one in options.candidates),
        )
        self._running: dict[int, _Runner] = {}
        """From the first seed, those that are not at an end."""
        self._teacher: nn.Module | None = build_teacher(task) if options.recovery.distill else None

    def run(self) -> Cuts:
        numbers = [n for n in range(len(self._found.cuts)) if self._cut(n).ended is None]
        try:
            if self._options.allowed is not None:
                numbers = self._halved(self._able(numbers, self._runner))
            self._able([_REFERENCE, *numbers], self._come_to_the_end)
        except _OutOfTime:
            note = "the time for judging cuts was up before all of them were judged"
            self._found = self._found.model_copy(update={"notes": (*self._found.notes, note)})
        return self._found

    def _halved(self, numbers: list[int]) -> list[int]:
        """Those that come to the end."""
        self._time(numbers)
        for rung, share in [*enumerate(RUNGS[:-1])][self._found.num_halved :]:
            numbers = self._able([_REFERENCE, *numbers], partial(self._come_to, rung=rung))
            rows = [Standing(n, self._cut(n).step or 1.0, self._lost(n, rung)) for n in numbers]
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

    def _lost(self, number: int, rung: int) -> float:
        """Drop in quality over the allowed one."""
        reference, allowed = self._found.reference.rungs[rung], self._options.allowed or 0.0
        allowed *= abs(reference) if self._options.is_share else 1.0
        return (reference - self._cut(number).rungs[rung]) / max(allowed, 1e-12)

    def _runner(self, number: int) -> _Runner:
        """From the first seed; anew where another process had begun it."""
        if number not in self._running:
            self._running[number] = self._begun(number, self._options.seeds[0])
            self._keep(number, settings=self._running[number].settings)
        return self._running[number]

    def _begun(self, number: int, seed: int) -> _Runner:
        if self._options.most_s is not None and time.monotonic() - self._began_s > self._options.most_s:
            raise _OutOfTime
        settings = self._recorded(self._cut(number).settings)
        with (random := Randomness(seed)):
            training = apply(self._plan.model_copy(update={"settings": settings}), self._task, seed=seed, enforce=True)
            applied = training.settings
            if self._teacher is not None and number != _REFERENCE:
                training = distilled(training, self._task, self._teacher)
            recovery = Recovery(training, self._task, self._options.recovery)
        return _Runner(recovery, applied, random)

    def _recorded(self, settings: Settings) -> Settings:
        """With the record of a cut that another candidate has made."""
        for asked, found in zip(self._options.candidates, self._found.cuts, strict=True):
            for one in asked.techniques():
                if one.reads_values and one == getattr(settings, one.name):
                    settings = settings.having(getattr(found.settings, one.name))
        return settings

    def _time(self, numbers: list[int]) -> None:
        """Compare step times, one step of each in its turn."""
        left = [n for n in numbers if self._cut(n).step is None]
        self._note("timing steps")
        for _ in range(_NUM_TIMED if left else 0):
            left = self._able([_REFERENCE, *left], lambda number: self._runner(number).step())
        for number in left:
            own, reference = (median(self._runner(one).seconds[1:]) for one in (number, _REFERENCE))
            self._keep(number, step=max(own / reference, 1e-6))

    def _come_to(self, number: int, rung: int) -> None:
        """Be judged at a rung and those before, from the first seed."""
        for at in range(len(self._cut(number).rungs), rung + 1):
            self._note(f"{self._name(number)} recovers, to {RUNGS[at]:.3g} of the steps")
            found = self._runner(number).until(RUNGS[at])
            self._keep(number, rungs=(*self._cut(number).rungs, found.value))

    def _come_to_the_end(self, number: int) -> None:
        """Be judged from all seeds."""
        for place in range(len(self._cut(number).qualities), len(self._options.seeds)):
            began_s, seed = time.monotonic(), self._options.seeds[place]
            self._note(f"{self._name(number)} recovers, from seed {seed}")
            runner = self._begun(number, seed) if place else self._runner(number)
            rungs = self._cut(number).rungs if place == 0 else ()
            early = rungs[_EARLY] if len(rungs) > _EARLY else runner.until(RUNGS[_EARLY]).value
            found = runner.until(1.0)
            quality = Quality(**found._asdict(), early=early, seconds=time.monotonic() - began_s)
            self._keep(number, settings=runner.settings, qualities=(*self._cut(number).qualities, quality))
            self._running.pop(number, None)

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
