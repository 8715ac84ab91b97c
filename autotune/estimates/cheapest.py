"""``cheapest``: of some combinations of techniques, the settings of least work that are predicted to fit a limit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import lru_cache

from ..errors import PlanError
from ..measure.profiling.rows import peak_moment
from ..task import Task
from ..techniques import Settings, Technique
from .checkpointing.block_choice import Places, as_bytes, believed
from .checkpointing.process_choice import ProcessChoice
from .max_batch import fills_of
from .memory_model import MemoryModel
from .memory_model_cache import MemoryModelCache
from .predictor import Predictor
from .tracing.fake_step import Untraceable
from .types import Cheapest, CheapestOptions, Foretold, Interval

_SPREAD, _SPREAD_MAPPED = 1.3, 1.1
"""By how much more than the upper end of its interval a process may be charged beside what it held before, on a CPU,
where glibc allots its memory, and nothing measures this one; and where large tensors have pages of their own. A Gemma 2
whose step has several tensors of just under 32 MiB, the largest that glibc puts on its heap, took 1.12 to 1.26 times as
much in four runs of three steps; 20 others took at most 1.06 times (``benchmarks/results/fit-cpu.jsonl``). Not bounded:
that heap grew at each step, and in a fifth run the fourth step was above this, too. With pages of their own, 60
trainings of 23 models took 1.00 to 1.11 times the middle of the interval, 1.02 at the median; one of them, a SegFormer,
took 3 MiB more than its upper end."""
_MOST_KEPT = 24
"""Predictors kept at a time: those that a program is made from, and what it finds. Each holds its traces, and the
task's model where it was probed."""


def cheapest(
    task: Task,
    options: CheapestOptions,
    base_bytes: int | None = None,
    memory_models: MemoryModelCache | None = None,
) -> Cheapest:
    """Choose settings for the job's own batch.

    Combinations are looked at in the order of the work that they are believed to add, and none that adds more than the
    best so far: most need not be traced.

    Args:
        task: what they are applied to.
        options: what to choose from, the device that is planned for, and its limit.
        base_bytes: what the process is charged without the step's tensors; None finds out.
        memory_models: the task's, where they serve further calls.

    Returns:
        The choice; the upper end of its interval is within the limit.

    Raises:
        Exception: whatever the user's code raises.
    """
    began_s = time.perf_counter()
    choice = _Choice(task, options, base_bytes, memory_models)
    stock, *others = options.combinations
    choice.consider(stock)
    for combination in sorted(others, key=believed):
        choice.consider(combination)
    return choice.result(began_s)


class _Choice:
    """What is known so far."""

    def __init__(
        self, task: Task, options: CheapestOptions, base_bytes: int | None, memory_models: MemoryModelCache | None
    ) -> None:
        self._task, self._options, self._micro = task, options, options.own_micro
        self._stock = Predictor(task, self._asked(options.combinations[0]), base_bytes, memory_models, (self._micro,))
        self._places = Places.of(task) if options.choices else Places(0, {})
        self._choices = tuple(itertools.chain.from_iterable(asked.chosen() for asked in options.choices))
        self._of = lru_cache(_MOST_KEPT)(self._predictor)
        self._seen: list[Foretold] = []
        self._refused: list[tuple[Settings, str]] = []
        self._best: Foretold | None = None

    def consider(self, combination: Settings) -> None:
        """Look at a combination, where it may be better than the best."""
        if self._best is not None and self._is_worse(combination, self._best):
            return
        if not self._seen:
            self._note(combination)
        try:
            self._look_at(combination)
        except PlanError as error:  # this model cannot have it
            self._refused.append((combination, str(error)))

    def _is_worse(self, settings: Settings, best: Foretold) -> bool:
        """Whether settings that can but take longer than the job as it stands are believed slower than the best."""
        return _only_adds(settings) and self._seen[0].work * believed(settings) >= best.work

    def _look_at(self, plain: Settings) -> None:
        choice = ProcessChoice(self._places, self._of, self._able(plain))
        try:
            found = choice.choose(plain, self._micro, self._options.limit_bytes, self._counts(plain))
            looked_at = choice.of(plain, self._micro).smallest(self._micro) if found is None else [found]
        except Untraceable:  # no trace tells what a block keeps: each choice everywhere
            looked_at = sorted(choice.everywhere(plain), key=believed)
        for settings in looked_at:
            if self._best is None or not self._is_worse(settings, self._best):
                self._take(settings)

    def _able(self, plain: Settings) -> tuple[Technique, ...]:
        """What can be chosen for a combination: what it does not contradict, and the model can have."""
        found = []
        for one in self._choices:
            settings = plain.having(one)
            if settings.conflict() is not None:
                continue
            try:
                if self._process(plain).high > self._options.limit_bytes:
                    self._of(settings).memory_model(self._micro)
                found.append(one)
            except PlanError as error:
                self._refused.append((settings, str(error)))
        return tuple(found)

    def _take(self, settings: Settings) -> None:
        found = self._note(settings)
        fits = found.process.high <= self._options.limit_bytes
        if fits and (self._best is None or found.work < self._best.work):
            self._best = found

    def _note(self, settings: Settings) -> Foretold:
        found = Foretold(settings=settings, process=self._process(settings), work=self._work(settings))
        self._seen.append(found)
        return found

    def _work(self, settings: Settings) -> float:
        """Of an optimizer step: what is counted as it stands and what the choices add, with what is believed of all
        that counting leaves out."""
        own = tuple(one for one in self._choices if getattr(settings, one.name) != type(one)())
        plain = settings.having(*(type(one)() for one in own))
        predictor = self._of(plain)
        found, passes = predictor.memory_model(self._micro).memory_model, predictor.fit(self._micro).accumulate
        (step, optimizer), times = found.work(self._micro), passes / min(passes, 2)
        counted = as_bytes(step) * times + as_bytes(optimizer)
        if not own:
            return counted * believed(plain)
        if isinstance(found, MemoryModel):
            ways = ProcessChoice(self._places, self._of, own).of(plain, self._micro)
            return believed(plain) * (counted + times * ways.cost(settings, self._micro))
        step, _ = self._of(settings).memory_model(self._micro).memory_model.work(self._micro)
        return max(counted, as_bytes(step) * times + as_bytes(optimizer)) * believed(settings)

    def _process(self, settings: Settings) -> Interval:
        return self._spread(self._of(settings).process(self._micro, settings), settings)

    def _counts(self, plain: Settings) -> Callable[[Interval], int]:
        return lambda process: self._spread(process, plain).high

    def _spread(self, process: Interval, settings: Settings) -> Interval:
        """With what one process differs from another."""
        if self._options.target == "cuda":
            return process
        beside = self._stock.base_bytes
        spread = _SPREAD_MAPPED if settings.allocator.kind == "mmap" else _SPREAD
        return process.model_copy(update={"high": round(beside + (process.high - beside) * spread)})

    def _predictor(self, settings: Settings) -> Predictor:
        if settings == self._options.combinations[0]:
            return self._stock
        known = self._stock.base_bytes, self._stock.memory_models
        return Predictor(self._task, self._asked(settings), *known, (self._micro,))

    def _asked(self, settings: Settings) -> CheapestOptions:
        return self._options.model_copy(update={"settings": settings})

    def result(self, began_s: float) -> Cheapest:
        """What came of it."""
        least = min(self._seen, key=lambda one: one.process.high)
        found = self._of((self._best or least).settings).memory_model(self._micro)
        trace = found.memory_model.at(self._micro)
        moment = peak_moment(trace)
        return Cheapest(
            chosen=self._best,
            stock=self._seen[0],
            least=least,
            how=found.how,
            reason=found.reason,
            phase=moment.phase,
            module=moment.module,
            fills=tuple(fills_of(trace)),
            refused=tuple(self._refused),
            seconds=time.perf_counter() - began_s,
        )


def _only_adds(settings: Settings) -> bool:
    """Whether it can but take longer than the job as it stands."""
    return all(mean < 0 for mean, _ in (one.prior_gain() for one in settings.chosen()))
