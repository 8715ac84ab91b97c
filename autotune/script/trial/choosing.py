"""What a script's step is predicted to take: its first steps are recorded, and what fits a budget is chosen for them
in the script's own process, before it is ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import torch

from ...errors import AutotuneError
from ...estimates import Cheapest, CheapestOptions
from ...fitting.fit import place, set_apart
from ...fitting.job import Job
from ...fitting.whole_batch import Loop
from ...workers import Chosen, Failed, Outcome
from ...workers.request import PredictRequest
from ..observer import Observer
from ..plan.applied import InScript
from ..refusal import why_no_model
from ..shards import unwrapped
from .recorded import RecordedPass, Recorder

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

    def forward(self, inputs: Any) -> None:
        """Record from here."""
        super().forward(inputs)
        self._recorder.called(unwrapped(self._found.model), inputs)

    def forward_ended(self, outputs: Any) -> None:
        """Record what is made of these."""
        self._recorder.returned(outputs)

    def evaluated(self, inputs: Any = None) -> None:
        """Within a step that is not recorded."""
        super().evaluated(inputs)
        self._recorder.evaluated()

    def backward(self, loss: Any) -> None:
        """A pass is recorded."""
        one, known = self._recorder.passed_back(loss), self._largest
        super().backward(loss)
        if one is not None and (known is None or one.num_elements > known.num_elements):
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
            outcome: Outcome = Chosen(found=self._choose(optimizer, num_backwards))
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
        return self._recorder.why if self._largest is None else None

    def _choose(self, optimizer: torch.optim.Optimizer, num_backwards: int) -> Cheapest:
        assert self._largest is not None, "else there is a reason"
        one = replace(self._largest, held=self._recorder.let_go())
        model = unwrapped(self._found.model)
        loop = Loop(one, accumulate=num_backwards)
        for parameter in model.parameters():
            parameter.grad = None  # a step's own, which is traced
        target, is_here = place(model, self._options.target)
        job = Job(model, one.batch, optimizer, loop, goes_on=False)
        with set_apart(model, target):
            return job.choose(self._options.model_copy(update=loop.sizes), is_here)
