"""``cheapest``: of some combinations of techniques, the settings with the fastest step that are predicted to fit a
limit."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterable
from functools import cached_property, lru_cache

import torch

from ..errors import PlanError
from ..measure.profiling.allocations import Trace
from ..measure.profiling.rows import peak_moment
from ..task import Task
from ..techniques import Settings, Technique
from ..techniques.allocator import Allocator
from ..training.apply_plan import build_model
from ..training.skip_init import skip_init
from .checkpointing.block_choice import Places, Slower, believed
from .checkpointing.process_choice import ProcessChoice
from .max_batch import fills_of
from .memory_model import MemoryModel
from .memory_model_cache import MemoryModelCache
from .predictor import Predictor
from .technique_speeds import with_techniques
from .time_law import law_here, page_seconds, seconds
from .tracing.fake_step import Untraceable
from .tracing.work import Work
from .types import COUNTED, Cheapest, CheapestOptions, Foretold, Interval, TimeLaw

_SPREAD, _HOLES, _MOST_SPREAD = 0.1, 1.7, 0.5
"""By how much more than the upper end of its interval a process on a CPU may be charged beside what it held before: by
a tenth, or by what holes in glibc's heap may come to, if that is more, and by half at most.

A large tensor that is freed leaves a hole that none of its size fits into, and which smaller ones break up. Its size
times the root of how many of at least half of it a step makes, as in a random walk, times 1.7, is the least that no
training on the heap passed for which it is more than a tenth (``benchmarks/results/fit-cpu.jsonl``, three steps
each). A Gemma 2 (15 tensors from 15 to 31 MiB, just under the 32 that glibc maps) took up to 46 % more than the upper
end, where this is 48; a SegFormer (39 of 11 MiB) 31 and 34, a ViT (30 of 6 MiB) 11 and 16, a BART (5 of 23 MiB) 15
and 29. With tensors all small, T5 took 9 % more, with pages of their own too; BERT and GPT-2 1 %. It is no bound:
that Gemma's heap grows at each step; with pages from 16 MiB on it stayed 9 % below the upper end."""
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

    Combinations are looked at in the order of the least time that they can take, and none whose is more than the
    best takes: most need not be traced.

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
    for combination in sorted(others, key=choice.at_least_s):
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
        self._law = self._measured() if options.is_here else COUNTED

    def _measured(self) -> TimeLaw:
        """Of this device, at sizes of the job as it stands."""
        found = self._stock.memory_model(self._micro).memory_model
        if isinstance(found, MemoryModel):
            step = found.steps[-1] if found.steps else found.trace_step(self._micro)
            flops = [one.flops for one in step.work.values()]
        else:
            flops = [one.flops for one in found.work(self._micro)]
        dtype = _product_dtype(self._task, self._options.combinations[0])
        target, peak_bytes = self._options.target, found.at(self._micro).peak_bytes()
        try:
            law = law_here(target, dtype, flops, peak_bytes)
            return with_techniques(law, target, self._task, self._choices, peak_bytes)
        except RuntimeError:  # memory that others have, or deterministic algorithms alone
            return COUNTED

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
        return _only_adds(settings) and self.at_least_s(settings) >= best.step_s

    def at_least_s(self, settings: Settings) -> float:
        """Seconds of a step as it stands, with what is believed of settings and the pages that their allocator takes
        for it."""
        stock = self._options.combinations[0]
        more_s = self._pages_s(stock, settings) - self._pages_s(stock, stock)
        return (self._seen[0].step_s + more_s) * believed(settings, self._law)

    def _pages_s(self, of: Settings, settings: Settings) -> float:
        """Seconds of a step's new pages, with the allocator of other settings."""
        if not self._law.new_byte_s:
            return 0.0
        trace = self._of(of).memory_model(self._micro).memory_model.at(self._micro)
        return sum(page_seconds(self._law, trace, settings.allocator).values()) * self._times

    def _look_at(self, plain: Settings) -> None:
        choice = ProcessChoice(self._places, self._of, self._able(plain), self._law)
        try:
            most_s = self._room_s(plain)
            found = choice.choose(plain, self._micro, self._options.limit_bytes, self._counts, most_s)
            looked_at: Iterable[Settings]
            looked_at = choice.of(plain, self._micro).smallest(self._micro) if found is None else [found]
        except Slower:
            return
        except Untraceable:  # no trace tells what a block keeps: each choice everywhere
            everywhere = sorted(choice.everywhere(plain), key=self.at_least_s)
            looked_at = (one for one in everywhere if self._best is None or not self._is_worse(one, self._best))
        for settings in looked_at:
            self._take(settings)

    def _able(self, plain: Settings) -> tuple[Technique, ...]:
        """What can be chosen for a combination: what it does not contradict, and the model can have; what makes the
        same step as less does is left out."""
        found: list[Technique] = []
        for one in self._choices:
            settings = plain.having(one)
            if settings.conflict() is not None:
                continue
            try:
                if self._process(plain).high > self._options.limit_bytes:
                    others = [plain, *(plain.having(other) for other in found if other.name == one.name)]
                    if self._step(settings) in map(self._step, others):
                        continue
                found.append(one)
            except PlanError as error:
                self._refused.append((settings, str(error)))
        return tuple(found)

    def _step(self, settings: Settings) -> tuple[Trace, tuple[Work, Work]]:
        """What is known of a step."""
        found = self._of(settings).memory_model(self._micro).memory_model
        return found.at(self._micro), found.work(self._micro)

    def _take(self, settings: Settings) -> None:
        found = self._note(settings)
        fits = found.process.high <= self._options.limit_bytes
        if fits and (self._best is None or found.step_s < self._best.step_s):
            self._best = found

    def _note(self, settings: Settings) -> Foretold:
        found = Foretold(settings=settings, process=self._process(settings), step_s=self._step_s(settings))
        self._seen.append(found)
        return found

    def _step_s(self, settings: Settings) -> float:
        """Of an optimizer step: what is counted as it stands and what the choices add, with what is believed of all
        that counting leaves out."""
        own = tuple(one for one in self._choices if getattr(settings, one.name) != type(one)())
        plain = settings.having(*(type(one)() for one in own))
        counted_s = self._counted_s(plain)
        if not own:
            return counted_s * believed(plain, self._law)
        if isinstance(self._of(plain).memory_model(self._micro).memory_model, MemoryModel):
            ways = ProcessChoice(self._places, self._of, own, self._law).of(plain, self._micro)
            return believed(plain, self._law) * (counted_s + self._times * ways.cost(settings, self._micro))
        return max(counted_s, self._counted_s(settings)) * believed(settings, self._law)

    def _counted_s(self, settings: Settings) -> float:
        """Seconds of what is counted of an optimizer step."""
        step, optimizer = self._of(settings).memory_model(self._micro).memory_model.work(self._micro)
        pages_s = self._pages_s(settings, settings)
        return seconds(self._law, step) * self._times + seconds(self._law, optimizer) + pages_s

    @cached_property
    def _times(self) -> float:
        """Micro-batches of an optimizer step over those of a traced one."""
        passes = self._stock.fit(self._micro).accumulate
        return passes / min(passes, 2)

    def _room_s(self, plain: Settings) -> float:
        """Seconds that what is chosen for a combination may add to a pass before the best so far is as fast."""
        if self._best is None:
            return math.inf
        return (self._best.step_s / believed(plain, self._law) - self._counted_s(plain)) / self._times

    def _process(self, settings: Settings) -> Interval:
        return self._spread(self._of(settings).process(self._micro, settings), settings)

    def _counts(self, process: Interval, settings: Settings) -> int:
        return self._spread(process, settings).high

    def _spread(self, process: Interval, settings: Settings) -> Interval:
        """With what one process differs from another."""
        if self._options.target == "cuda":
            return process
        trace = self._of(settings).memory_model(self._micro).memory_model.at(self._micro)
        beside, holes = process.high - self._stock.base_bytes, _HOLES * _holes_bytes(trace, settings.allocator)
        more = max(_SPREAD * beside, min(_MOST_SPREAD * beside, holes))
        return process.model_copy(update={"high": process.high + round(more)})

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
            law=self._law,
            seconds=time.perf_counter() - began_s,
        )


def _holes_bytes(trace: Trace, allocator: Allocator) -> float:
    """The largest tensor that a step makes on the heap, times the root of how many are at least half as large."""
    sizes = [one.num_bytes for one in trace.allocations if one.born > 0 and one.num_bytes < allocator.maps_from]
    largest = max(sizes, default=0)
    return largest * math.sqrt(sum(2 * num_bytes >= largest for num_bytes in sizes))


_PRODUCTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _product_dtype(task: Task, settings: Settings) -> torch.dtype:
    """What most of a model's products are computed in: autocast's type, or that of most parameters; those of 8
    bits are multiplied in another."""
    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}
    kind = settings.precision.in_force(task.precision).autocast
    sizes = Counter[torch.dtype]()
    for parameter in build_model(skip_init(task)).parameters() if kind is None else ():
        if parameter.dtype in _PRODUCTS:
            sizes[parameter.dtype] += parameter.numel()
    return autocast.get(kind or "") or max(sizes, key=sizes.__getitem__, default=torch.float32)


def _only_adds(settings: Settings) -> bool:
    """Whether it can but take longer than the job as it stands."""
    return all(mean < 0 for mean, _ in (one.prior_gain() for one in settings.chosen()))
