"""Halves the micro-batch when memory runs out in a job, repeats the optimizer step that was begun, and tries the larger
one again later."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..data.positions import Position
from ..device_memory import cap
from ..errors import AutotuneError, Caught
from ..nested import rows_of, samples_in, tensors_in
from ..ranks import this_rank, world_size
from ..techniques.batch import Batch
from .out_of_memory import is_out_of_memory, ran_out
from .together import RanOutElsewhere, Together

_TOO_LATE = (
    "autotune: the micro-batch cannot be halved: memory ran out once the processes had agreed that it had not, so that "
    "the others go on with this optimizer step."
)
CALM_STEPS = 100
"""Optimizer steps without a lack of memory after which the micro-batch grows back, unless others are asked for."""
_Passed = tuple[torch.Tensor, float | torch.Tensor]
"""Of a forward and backward pass: the detached mean loss, and what it is over."""


class Halving:
    """Trains on micro-batches in parts that are small enough for the memory.

    The gradients of a backward pass that ran out of memory are of no use, nor are those that it was added to. So the
    micro-batches of an optimizer step are kept until it is taken.
    """

    def __init__(
        self, batch: Batch, is_on: bool, together: Together | None = None, calm_steps: int = CALM_STEPS
    ) -> None:
        """
        Args:
            batch: of which micro-batches are whole.
            is_on: whether to halve where memory runs out; else what was halved before stays so.
            together: with other ranks, which halve where memory runs out in one of them, and grow back after as many
                steps.
            calm_steps: optimizer steps without a lack of memory after which the micro-batch is doubled again. Where
                memory then runs out before as many have passed, twice as many are waited for the next time: what lacks
                for good costs ever less.
        """
        self._batch, self._is_on, self._together = batch, is_on, together
        self.times = 0
        """How often the micro-batch is halved."""
        self._calm_steps = self._wait = calm_steps
        self._num_calm, self._has_grown = 0, False
        self._kept: list[tuple[Any, Position | None]] = []
        self._has_all, self._has_agreed = True, False

    @property
    def parts(self) -> int:
        """Number of forward passes for one micro-batch."""
        return 1 << self.times if self._batch.tokens else -(-self._batch.micro // self.micro)

    @property
    def micro(self) -> int:
        """Samples in one forward pass; of one in tokens, the longest."""
        return -(-self._batch.micro // (1 << self.times))

    @property
    def batch(self) -> Batch:
        """How an optimizer step is split into forward passes."""
        whole = self._batch
        if not self.times:
            return whole
        halved = whole.model_copy(update={"micro": self.micro}).with_samples(whole.num_samples)
        tokens = whole.tokens and max(1, whole.tokens >> self.times)
        return halved.model_copy(update={"tokens": tokens})

    @property
    def _words(self) -> str:
        return f"{self.micro} samples" if self._batch.tokens is None else f"{self.batch.tokens:,} tokens"

    def forget(self, has_all: bool = True) -> None:
        """An optimizer step begins; ``has_all`` is False if it resumes one that another process began."""
        self._kept, self._has_all = [], has_all

    def step_ended(self) -> None:
        """An optimizer step was taken."""
        self.forget()
        self._num_calm += 1  # also once it has grown back: what lacks long after is new
        if not self._is_on or not self.times or self._num_calm < self._wait:
            return
        before, self.times, self._num_calm, self._has_grown = self._words, self.times - 1, 0, True
        if not this_rank().rank:
            warnings.warn(
                f"no lack of memory in {self._wait} optimizer steps: a forward pass takes {self._words} again, "
                f"in place of {before}.",
                stacklevel=3,
            )

    def state_dict(self) -> dict[str, int]:
        """How often it is halved, and how far it is from growing back."""
        return {
            "times": self.times,
            "num_calm": self._num_calm,
            "wait": self._wait,
            "has_grown": int(self._has_grown),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self.times, self._num_calm, self._wait = state["times"], state["num_calm"], state["wait"]
        self._has_grown = bool(state["has_grown"])

    def agree(self) -> None:
        """The last backward pass of an optimizer step is made: go on once it is in all ranks.

        Raises:
            RanOutElsewhere: memory ran out in another; every rank makes the step again.
            torch.OutOfMemoryError: there is none left here for the exchange of gradients that follows.
        """
        if self._together is None:
            return
        self._together.make_room()
        if self._together.any_ran_out(here=False):
            raise RanOutElsewhere
        self._has_agreed = True

    def run(
        self,
        batch: Any,
        position: Position | None,
        begins_step: bool,
        train: Callable[[Any, Position | None], _Passed],
        drop: Callable[[], None],
        is_whole: Callable[[], bool],
    ) -> _Passed:
        """Train on a micro-batch; where memory runs out, on its optimizer step so far, in smaller parts.

        Args:
            batch: the micro-batch.
            position: its place in its optimizer step.
            begins_step: whether it is the first of one.
            train: forward and backward pass of a micro-batch, or of a part of one.
            drop: lets go of the gradients of the optimizer step so far.
            is_whole: whether they still are what they were before this micro-batch.

        Raises:
            Exception: whatever the task raises; a lack of memory that cannot be helped.
        """
        if not self._is_on:
            if cap.may_stand_aside():
                with Caught(AutotuneError, frames=True) as raised:
                    return _joined([train(*part) for part in self._split(batch, position)])
                self._stand_aside(raised.take(), is_whole())
            return _joined([train(*part) for part in self._split(batch, position)])
        if begins_step:
            self.forget()
        self._kept.append((batch, position))
        todo = self._kept[-1:]
        while True:
            self._has_agreed = False
            with Caught(AutotuneError, frames=True) as raised:
                return [_joined([train(*part) for part in self._split(*entry)]) for entry in todo][-1]
            said = self._heard(raised)
            drop()  # here nothing holds the frames any more, and what is in them
            self._halve(said)
            todo = self._kept

    def _stand_aside(self, error: BaseException, is_whole: bool) -> None:
        """A micro-batch failed: where the plan's budget may be the reason, it can be made again without it.

        Raises:
            Exception: what was raised, where it was not, or others went on with the optimizer step, or it was begun.
        """
        try:
            if ran_out(error) != "device" or not is_whole or world_size() > 1:
                raise error
        finally:
            del error  # which holds this frame, and what is in those that failed
        gc.collect()
        cap.stand_aside()

    def _heard(self, raised: Caught) -> str:
        """What the ranks said in which memory ran out.

        Raises:
            Exception: what was raised, where that is no lack of memory, or one that cannot be helped.
        """
        error = raised.take()
        elsewhere = isinstance(error, RanOutElsewhere)
        try:
            if not elsewhere and not is_out_of_memory(error):
                raise error
            if self._has_agreed:
                error.add_note(_TOO_LATE)
                raise error
            own = None if elsewhere else str(error).strip().partition("\n")[0]
            said, obstacle = self._agreed(own, self._obstacle(ran_out=not elsewhere))
            if obstacle is not None:
                note = f"autotune: the micro-batch cannot be halved: {obstacle}."
                if elsewhere:
                    raise torch.OutOfMemoryError(f"{said}\n{note}")
                error.add_note(note)
                raise error
            return said
        finally:
            del error  # which holds this frame

    def _agreed(self, said: str | None, obstacle: str | None) -> tuple[str, str | None]:
        """Of all ranks: what those said in which memory ran out, and what keeps any of them from halving."""
        if self._together is None:
            return said or "", obstacle
        if said is not None:
            self._together.any_ran_out(here=True)
        found = self._together.gathered((said, obstacle))
        told = "; ".join(f"process {rank}: {said}" for rank, (said, _) in enumerate(found) if said is not None)
        return told, next((obstacle for _, obstacle in found if obstacle is not None), None)

    def _obstacle(self, ran_out: bool) -> str | None:
        """Why the batches of this optimizer step cannot be taken in parts that are half as large.

        Args:
            ran_out: whether memory ran out here, and not in another rank.
        """
        if ran_out and all(self._part(self._num_samples(*entry)) == 1 for entry in self._kept):
            return "one sample does not fit"
        if not self._has_all:
            return "this optimizer step was begun before the state was loaded"
        self.times += 1
        try:
            for entry in self._kept:
                [*self._split(*entry)]
        except ValueError as reason:
            return f"{reason}"
        finally:
            self.times -= 1
        return None

    def _halve(self, said: str) -> None:
        before, num_passes = self._words, self.parts
        self.times += 1
        too_soon = self._has_grown and self._num_calm < self._wait
        self._wait = 2 * self._wait if too_soon else self._calm_steps
        self._num_calm, self._has_grown = 0, False
        gc.collect()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
        if this_rank().rank:
            return  # the first tells it
        warnings.warn(
            f"out of memory ({said}): from here on a forward pass takes {self._words} in place of {before}, and "
            f"a micro-batch {self.parts} passes in place of {num_passes}. An optimizer step sees the same samples; a "
            "BatchNorm sees fewer at a time. To search for a plan with room, give a smaller --budget.",
            stacklevel=4,
        )

    def _part(self, num_samples: int) -> int:
        """Samples in one forward pass of a micro-batch of so many."""
        return self.micro if self._batch.tokens is None else -(-num_samples // (1 << self.times))

    @staticmethod
    def _num_samples(batch: Any, position: Position | None) -> int:
        return position.num_samples if position is not None else samples_in(batch)

    def _split(self, batch: Any, position: Position | None) -> Iterator[tuple[Any, Position | None]]:
        """
        Raises:
            ValueError: nothing in it has the samples for its first dimension, or that is not sure.
        """
        if self.times == 0:
            yield batch, position
            return
        num_samples = self._num_samples(batch, position)
        part_size = self._part(num_samples)
        if num_samples <= part_size:
            yield batch, position
            return
        if not any(tensor.dim() and len(tensor) == num_samples for tensor in tensors_in(batch)):
            raise ValueError(f"it has no tensor whose first dimension is its {num_samples} samples")
        for start in range(0, num_samples, part_size):
            stop = min(start + part_size, num_samples)
            part = rows_of(batch, num_samples, slice(start, stop))
            if position is None:
                yield part, None
            else:
                ends = position.ends_step and stop == num_samples
                yield part, position._replace(num_samples=stop - start, ends_step=ends)


def _joined(passed: list[_Passed]) -> _Passed:
    """The mean over all parts."""
    if len(passed) == 1:
        return passed[0]
    count = sum(count for _, count in passed)
    total = sum(mean * count for mean, count in passed)
    assert isinstance(total, torch.Tensor), "of the losses"
    return total / (torch.where(count == 0, 1, count) if isinstance(count, torch.Tensor) else count or 1.0), count
