"""What a script's step is predicted to take: its first steps are recorded, and what fits a budget is chosen for them
in the script's own process, before it is ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import nn

from ...errors import AutotuneError
from ...estimates import Cheapest, CheapestOptions
from ...fitting.fit import place, set_apart
from ...fitting.job import Job
from ...fitting.whole_batch import Loop
from ...nested import tensors_in
from ...workers import Chosen, Failed, Outcome
from ...workers.request import PredictRequest
from ..observer import Observer
from ..plan.applied import InScript
from ..plan.contexts import is_traced
from ..plan.patches import patch
from ..refusal import why_no_model
from ..shards import unwrapped
from .recorded import RecordedPass, Recorder, keep_most

NUM_STEPS = 3
"""Optimizer steps that are seen: the choice is made for the pass of most data."""


class Choosing(Observer):
    """Records some optimizer steps, then answers with what fits."""

    def __init__(
        self,
        request: PredictRequest,
        found: InScript,
        answer: Callable[[Outcome], NoReturn],
        take_off: Callable[[], None],
    ) -> None:
        """
        Args:
            request: what to choose from, and the limit.
            found: the script's model, once it is.
            answer: takes the outcome, and ends the script.
            take_off: whatever observes the script: what is traced is not to be seen.
        """
        super().__init__()
        assert isinstance(request.options, CheapestOptions), "a script answers no other"
        self._options, self._found, self._answer, self._take_off = request.options, found, answer, take_off
        self._recorder = Recorder()
        self._largest: RecordedPass | None = None
        self._beside: dict[int, int] = {}
        """Of all passes, the most of each."""
        self._is_in_call = False
        """Whether the model is called, or a module that is counted."""

    def install(self) -> Any:
        """Watch loaders, and calls of modules that a pass does without."""
        taken_off = super().install(), patch(nn.Module, "__call__", self._around_call)

        def take_off() -> None:
            for each in taken_off:
                each()

        return take_off

    def _count(self, draw: Any) -> None:
        super()._count(draw)
        if not self.num_steps:
            self._recorder.begin()

    def _around_call(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Count what a model takes that is called without gradients, which no trace of a pass has."""
        is_handed_on = threading.current_thread() is not threading.main_thread()  # a recorder is of one thread
        if is_handed_on or self._is_in_call or not self._recorder.has_begun or is_traced():
            return original(module, *args, **kwargs)
        if next(module.parameters(), None) is None or _has_gradients(module, (args, kwargs)):
            return original(module, *args, **kwargs)
        self._is_in_call = True
        try:
            with self._recorder.beside(module, (args, kwargs)):
                return original(module, *args, **kwargs)
        finally:
            self._is_in_call = False

    def forward(self, inputs: Any) -> None:
        """Record from here."""
        super().forward(inputs)
        self._is_in_call = True
        self._recorder.called(unwrapped(self._found.model), inputs)

    def forward_ended(self, outputs: Any) -> None:
        """Record what is made of these."""
        self._recorder.returned(outputs)
        self._is_in_call = False

    def backward(self, loss: Any) -> None:
        """A pass is recorded."""
        one, known = self._recorder.passed_back(loss), self._largest
        super().backward(loss)
        if one is None:
            return
        keep_most(self._beside, one.beside)
        if known is None or one.num_elements > known.num_elements:
            self._largest = one

    def stepped(self, optimizer: torch.optim.Optimizer, num_backwards: int) -> None:
        """The last of them has its answer."""
        super().stepped(optimizer, num_backwards)
        if self.num_steps < NUM_STEPS:
            return
        self._take_off()
        if (why := self._why_not()) is not None:
            self._answer(Failed(message=f"the script's step cannot be traced: {why}. `autotune search` measures it."))
        try:
            outcome: Outcome = Chosen(found=self._choose(optimizer, num_backwards), notes=self._notes())
        except AutotuneError as error:
            outcome = Failed(message=str(error))
        self._answer(outcome)

    def _why_not(self) -> str | None:
        """Why there is no step to trace, in words."""
        if self._found.model is None:
            return why_no_model()
        if self._found.is_compiled:
            return "the script compiles its model itself"
        if self._found.is_in_parts:
            return "the script calls parts of its model one by one"
        is_known = self._largest is not None and self._recorder.lost_elements < self._largest.num_elements
        return None if is_known else self._recorder.why

    def _notes(self) -> tuple[str, ...]:
        if self._recorder.lost_elements < 0:
            return ()
        return (f"a pass of a smaller batch was not seen whole: {self._recorder.why}",)

    def _choose(self, optimizer: torch.optim.Optimizer, num_backwards: int) -> Cheapest:
        assert self._largest is not None, "else there is a reason"
        held = self._recorder.held()
        one = replace(self._largest, held=tuple(held), beside=self._beside)
        model = unwrapped(self._found.model)
        loop = Loop(one, accumulate=num_backwards, takes_fewer=False)
        target, is_here = place(model, self._options.target)
        job = Job(model, one.batch, optimizer, loop, goes_on=False, held=tuple(held.values()))
        with set_apart(model, target):
            return job.choose(self._options.model_copy(update=loop.sizes), is_here)


def _has_gradients(module: nn.Module, inputs: Any) -> bool:
    """Whether a graph is recorded of a call of a module, or it is within a backward pass."""
    if torch._C._current_autograd_node() is not None:
        return True
    tensors = chain(module.parameters(), tensors_in(inputs))
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
