"""The job's own evaluation in a trial: its memory and time, beside a training that is held in memory."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import nn

from ..errors import TaskError
from ..internals import lost
from ..nested import samples_in
from ..plan import Budget
from ..ranks import of_first, this_rank, world_size
from ..task import Task
from ..techniques.support.replica import within
from ..training.out_of_memory import is_out_of_memory
from ..training.training import Training
from .checks.quality import call_evaluate, evaluation_context
from .life.batches import PATIENCE, Batches
from .life.growth import Pile, Witness
from .measurement import Evaluated, EvaluationOptions, Growth, MeasureOptions
from .memory import LOOKS_S, Charge
from .timing.alarm import alarm
from .timing.compile_time import CompileTime

_LEAVES = 0.5
"""Share of what piled up that counts as left behind."""
_CALLS_NO_MODEL = 3 * PATIENCE
"""An evaluation that took so many times its time is ended wherever it is, except within a call of the model."""
_listeners: list[Callable[[Any], None]] = []
"""Who watches the evaluation that is under way, innermost last."""


def tell_of_batch(batch: Any) -> None:
    """An evaluation that may call parts of its model alone is about to evaluate a batch: whoever measures it counts the
    batch's samples, in the place of what the model is called with, and may end it here."""
    for listen in _listeners[-1:]:
        listen(batch)


def measure_evaluations(
    training: Training, task: Task, options: MeasureOptions, charge: Charge
) -> tuple[Evaluated, ...]:
    """Call the task's ``evaluate`` as the job does between two of its steps, at each batch that is asked for, upward.

    A batch that is likely to go over the budget is not tried, nor any behind one that the evaluation's data does not
    fill.

    Args:
        training: after whole optimizer steps.
        task: what it was built from.
        options: what is evaluated, for how long, and the budget.
        charge: reads the peak.

    Returns:
        What each took; none where nothing is asked for, or this torch does not let it be watched.

    Raises:
        TaskError: ``evaluate`` raised, or changed the model.
        Exception: memory ran out at the first batch; of several ranks, at any.
    """
    asked = options.evaluation
    if asked is None or task.evaluate is None or lost("evaluation") is not None:
        return ()
    budget = options.budget if options.enforce else None
    found: list[Evaluated] = []
    charge.enter("evaluation")
    for batch in asked.batches or (training.evaluation_batch,):
        if not of_first(_may_fit(found, budget)):
            break
        try:
            found.append(_evaluate(training, task, batch, options, charge))
        except (MemoryError, RuntimeError, TaskError) as error:
            if not found or world_size() > 1 or not is_out_of_memory(error):  # others may wait for this process
                raise
            break
        if of_first(batch is not None and 0 < found[-1].largest_call < batch):
            break
    charge.enter(None)
    for growth in (one.growth for one in found[:1]):
        if growth is not None and growth.whole_bytes is not None:
            charge.extend("evaluation", growth)
    return tuple(found)


def _may_fit(found: Sequence[Evaluated], budget: Budget | None) -> bool:
    """Whether twice the last batch may be within the budget: it takes what that did more than the one before, twice."""
    if not found or budget is None:
        return True
    last = found[-1]
    return budget.holds(last.peak_bytes + 2 * (last.peak_bytes - (last.before_bytes or 0)))


def _evaluate(training: Training, task: Task, batch: int | None, options: MeasureOptions, charge: Charge) -> Evaluated:
    asked, budget = options.evaluation, options.budget if options.enforce else None
    assert asked is not None, "the caller sees to it"
    before_bytes, live = charge.peak().process, charge.witness()
    began_with = live.read()
    record = EvaluationRecord(training.device, CompileTime())
    watch = _Watch(asked, charge, budget, record)
    is_whole = _called(training, task, batch, watch)
    found = record.ended(batch, lambda: _peak_bytes(charge), before_bytes, is_whole and not watch.pile.is_cut)
    growth = watch.pile.found(is_whole)
    kept = None
    if growth is not None and world_size() == 1 and not charge.exceeds(budget):
        again = _Watch(asked, charge, budget, EvaluationRecord(training.device, CompileTime()))
        kept = _kept(live, began_with, growth, lambda: _called(training, task, batch, again))
    return found.model_copy(update={"growth": growth, "kept_bytes": kept})


def _called(training: Training, task: Task, batch: int | None, watch: _Watch) -> bool:
    """Whether the evaluation came to its end, of all its batches or of fewer."""
    model = within(training.model)
    with watch.on(model):
        try:
            # a model that has hardly learned may well be worth NaN
            call_evaluate(task, model, batch, evaluation_context(training, task))
        except _Enough:
            return False
        except TaskError as error:
            if not watch.pile.is_cut or error.__cause__ is None or is_out_of_memory(error):
                raise
            return False  # it counts on all of the batches that were left out
    return True


def _kept(live: Witness, began_with: int | None, growth: Growth, again: Callable[[], object]) -> int | None:
    """What an evaluation leaves behind of what piled up in it, if the next one does so too; None where it lets go."""
    gc.collect()
    left = (live.read() or 0) - (began_with or 0)
    if began_with is None or left < _LEAVES * growth.bytes_per_batch * growth.num_batches:
        return None
    again()
    gc.collect()
    more = (live.read() or 0) - began_with - left
    return round(more * max(1.0, (growth.all_batches or 0) / growth.num_batches)) if more >= _LEAVES * left else None


def _peak_bytes(charge: Charge) -> int:
    charge.sample_descendants()
    return charge.peak().process


class _Enough(BaseException):
    """The evaluation was watched for long enough. No ``except Exception`` of the task's takes it for its own."""


class _Stop:
    """Tells at which call of the model an evaluation stops.

    Ranks may wait for each other in each call, or after it. So the first names the next but one as that call, while the
    others cannot have begun it.
    """

    _numbers = itertools.count()
    """The same of an evaluation in every rank."""

    def __init__(self) -> None:
        """An evaluation begins, in every rank."""
        self._ranks, self._store, self._key = this_rank(), None, f"autotune: evaluation {next(self._numbers)} stops at"
        if self._ranks.size > 1:
            from torch.distributed import distributed_c10d

            self._store = distributed_c10d._get_default_store()

    def is_at(self, num_calls: int, is_enough: bool) -> bool:
        """
        Args:
            num_calls: that were made.
            is_enough: whether this process has seen enough.
        """
        if self._store is None:
            return is_enough and num_calls > 0
        if self._store.check([self._key]):
            return num_calls >= int(self._store.get(self._key))
        if is_enough and self._ranks.rank == 0:
            self._store.set(self._key, str(num_calls + 1))
        return False


class EvaluationRecord:
    """Counts one evaluation's calls of the model, and times it; what compiling takes, which a job does once, is left
    out."""

    def __init__(self, device: torch.device, compile_time: CompileTime) -> None:
        """It begins here, once the device has done what was asked of it before."""
        self._device, self._compile_time = device, compile_time
        self.num_calls = self._num_samples = self._largest = 0
        self._began_s = 0.0
        self._synchronize()
        self._began_s = self.seconds()

    def call(self, num_samples: int) -> None:
        """The model evaluates so many samples."""
        self.num_calls += 1
        self._num_samples += num_samples
        self._largest = max(self._largest, num_samples)

    def seconds(self) -> float:
        """Wall time so far, whatever the device has still to do."""
        return perf_counter() - self._compile_time.seconds() - self._began_s

    def ended(
        self, batch: int | None, peak_bytes: Callable[[], int], before_bytes: int | None = None, is_whole: bool = True
    ) -> Evaluated:
        """What it came to, once the device has done all of it; ``batch`` is what it was told to evaluate at once."""
        self._synchronize()
        return Evaluated(
            batch=batch,
            seconds=self.seconds(),
            num_samples=self._num_samples,
            largest_call=self._largest,
            is_whole=is_whole,
            before_bytes=before_bytes,
            peak_bytes=peak_bytes(),
        )

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _Watch:
    """Looks at each call of the model while it is evaluated, and ends that where it takes too long or too much, also
    where it calls no model. Where something piles up, a DataLoader ends early, so that it is seen what is done with
    that at the end."""

    def __init__(
        self, options: EvaluationOptions, charge: Charge, budget: Budget | None, record: EvaluationRecord
    ) -> None:
        self.pile = Batches(Pile(charge.witness(), partial(charge.phase_bytes, LOOKS_S)), charge.taken)
        self._options, self._charge, self._budget, self._record = options, charge, budget, record
        self._stop, self._high_bytes, self._is_over, self._is_told = _Stop(), 0, False, False
        self._num_within = 0
        """Calls of the model that are under way."""

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Be told of the model's calls, by the attribute by which torch calls a compiled module: what is compiled sees
        nothing of it, and a copy of the model does not have it."""
        own = vars(model).get("_compiled_call_impl")
        inner = model._compiled_call_impl or model._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._is_told:
                self._look((args, kwargs))
            self._num_within += 1
            try:
                return inner(*args, **kwargs)
            finally:
                self._num_within -= 1

        vars(model)["_compiled_call_impl"] = call  # not through setattr, which would hand it on
        _listeners.append(self._hear)
        try:
            is_alone = world_size() == 1  # others may wait for this process
            ends = alarm(_CALLS_NO_MODEL * self._options.most_s, self._end) if is_alone else nullcontext()
            with self.pile.watched(lambda: self._had() if is_alone else 0.0), ends:
                yield
        finally:
            _listeners.pop()
            if own is None:
                del vars(model)["_compiled_call_impl"]
            else:
                vars(model)["_compiled_call_impl"] = own

    def _end(self) -> None:
        if not self._num_within and self._had() > _CALLS_NO_MODEL:
            raise _Enough

    def _hear(self, batch: Any) -> None:
        self._is_told = True
        self._look(batch)

    def _look(self, inputs: Any) -> None:
        self.pile.called()
        self._charge.sample_descendants(LOOKS_S)
        if (high_bytes := self._charge.high_water_bytes()) > self._high_bytes:
            self._high_bytes, self._is_over = high_bytes, self._charge.exceeds(self._budget)
        is_late = self._had() > 2 * PATIENCE
        is_enough = self._is_over or is_late or (self._is_long() and not self.pile.is_ending)
        if self._stop.is_at(self._record.num_calls, is_enough):
            raise _Enough
        self._record.call(samples_in(inputs))

    def _is_long(self) -> bool:
        """Whether it has had its time; more, where so few batches would not tell what piles up."""
        return self._had() > (1 if self.pile.tell else PATIENCE)

    def _had(self) -> float:
        """The share of its time that it has had."""
        return self._record.seconds() / self._options.most_s
