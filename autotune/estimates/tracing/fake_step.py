"""``FakeTraining``: optimizer steps over fake tensors, which have shapes and no data, and allocate as real ones do.

Source: torch's FakeTensorMode, https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html
"""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from ...errors import Caught, PlanError
from ...internals import lost
from ...internals.fake_tensors import FakeCopyMode, PlannedMode, planned_for
from ...layers.saved_by import SharedSavers
from ...measure.feed import largest, repeated
from ...measure.profiling.allocations import Phase, Trace
from ...measure.profiling.tracer import Sees, Shows, Tracer
from ...measure.profiling.watch import watched_step
from ...nested import dense_parts, tensors_in
from ...plan import Plan
from ...task import Task
from ...techniques.batch import Batch
from ...techniques.support.disk import kept_on_host, saved_to_host
from ...techniques.support.disk.updating import move_state
from ...training.apply_pieces import apply_to_optimizer
from ...training.apply_plan import apply, build_loader
from ...training.skip_init import skip_init
from ...training.training import Training
from ..types import Largest
from ..workspace import possible_bytes, workspace_bytes
from .fake_ops import SteadyScaler, Target, answers, choose_as_on_cuda
from .work import Work, WorkCounter


class Untraceable(Exception):
    """A training cannot run over fake tensors; the message says where it asked for a value."""


class Unlike(Exception):
    """A step that made other allocations than expected was given up after its forward."""


@dataclass(frozen=True)
class TracedStep:
    """A traced optimizer step at one batch."""

    trace: Trace
    """Its allocations, kernels' workspace among them."""
    work: Mapping[tuple[str, Phase], Work]
    """Work by module and phase."""
    possible_bytes: int = 0
    """Most that one kernel may take for itself beside what is known."""
    host_bytes: int = 0
    """What is in the host's memory at a time, of a step on a card."""
    host_kept_bytes: int = 0
    """What is there between steps, whatever the batch."""


class FakeTraining:
    """Runs optimizer steps of ``apply(plan, task)`` over fake tensors: nothing is computed, whatever the batch."""

    def __init__(
        self,
        plan: Plan,
        task: Task,
        largest_of: Largest = 1,
        target: Target = "cpu",
        savers: SharedSavers | None = None,
    ) -> None:
        """
        Args:
            plan: applied on the CPU; its batch does not matter.
            task: what it is applied to.
            largest_of: every batch repeats the largest of so many samples, so that shapes do not vary with its size.
            target: whose kernels are thought of: on CUDA, those of attention and dropout, what kernels take for
                themselves, and the optimizer's own choice are others.
            savers: of the model that layers are put on, shared by its copies; None runs each.

        Raises:
            Untraceable: the model or its optimizer cannot be copied.
            Exception: whatever the user's code raises.
        """
        # What the user calls beside a step keeps tensors of its own, which fake ones must not come among.
        self._task = replace(task, after_backward=None, after_step=None)
        self._target = target
        self._largest_of = largest_of
        with planned_for(target), savers or nullcontext():
            real = apply(plan, task if plan.settings.reads_values else self._applied_to(task))
        self._spec, self._settings = real.loader.spec, real.settings
        self._sample = largest_sample(self._spec.dataset, largest_of)
        self._given: set[Tensor] | None = None
        self._optimizer: torch.optim.Optimizer
        self._open(real)
        plan = Plan(settings=real.settings)  # what hangs on a parameter is not copied with it
        with planned_for(target):
            self._optimizer = apply_to_optimizer(plan, self._optimizer, max_grad_norm=task.max_grad_norm)
        self._reached = _reached_by(self._optimizer)
        if target == "cuda":
            choose_as_on_cuda(self._optimizer)

    def _applied_to(self, task: Task) -> Task:
        """A task whose model and data are fake: only sizes are looked at."""
        return skip_init(task)

    def _open(self, real: Training) -> None:
        """Make a fake model of one's own, and let go of the real one."""
        if (reason := lost("estimates")) is not None:
            raise Untraceable(reason)
        self._fakes = PlannedMode(self._target)
        with _untraceable_because("its model or optimizer cannot be copied"):
            self._model, self._optimizer = self._copied((real.model, real.optimizer))

    def step(self, micro: int, accumulates: bool = False, num_forward: int | None = None) -> TracedStep:
        """Trace a steady optimizer step.

        Args:
            micro: samples in one forward pass, >= 1.
            accumulates: trace two micro-batches, the second of which finds gradients; further ones are like it.
            num_forward: what the first forward is to allocate; None goes on whatever it does.

        Raises:
            Unlike: the first forward makes more or fewer allocations than that.
            Untraceable: the model, the loss or backward asks for a value.
        """
        training = self._training(Batch(micro=micro, accumulate=2 if accumulates else 1))
        batch = self._batch(micro)
        with self._context(), _old_objects_left_alone():
            if self._given is None:
                self._given = self._give_state(training, batch)
            while True:
                work = WorkCounter()
                scratch = _Scratch(self._target)
                model, optimizer, device = training.model, training.optimizer, training.device
                tracer = _Tracer(model, optimizer, device, True, scratch, work, self._shows())
                tracer.num_expected, tracer.given, tracer.reached = num_forward, self._given, self._reached
                kept_on_host.leave(model)
                self._step(training, tracer, batch)
                if not tracer.idle:
                    break
                for parameter in tracer.idle:  # no step gives it a gradient: the optimizer knows nothing of it
                    self._given.remove(parameter)
                    del self._optimizer.state[parameter]
        on_host = saved_to_host.most_host_bytes(model), kept_on_host.most_host_bytes(model)
        return TracedStep(tracer.trace(), work.by_place, scratch.possible_bytes, *on_host)

    def _give_state(self, training: Training, batch: Any) -> set[Tensor]:
        """Give the optimizer the state that it has after its first step, as if everything that trains got a gradient,
        without a forward.

        Returns:
            Parameters that have state from here on alone, on that assumption.
        """
        before = set(self._optimizer.state)
        parameters = [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        with Caught() as raised, self._answers(Phase.OPTIMIZER):
            self._optimizer.step()
        if raised.error is not None:  # one that wants gradients of a kind, such as sparse ones, has them made
            for parameter in set(self._optimizer.state) - before:
                del self._optimizer.state[parameter]
            self._optimizer.zero_grad(set_to_none=True)
            tracer = Tracer(training.model, self._optimizer, training.device, shows=self._shows())
            self._step(training, tracer, batch)
            return set()
        self._optimizer.zero_grad(set_to_none=True)
        move_state(self._optimizer)
        return set(self._optimizer.state) - before

    def _training(self, batch: Batch) -> Training:
        loader = build_loader(self._task, self._spec, batch)
        training = Training(self._model, self._optimizer, loader, self._task, self._settings)
        if training.scaler.is_enabled():
            training.scaler = SteadyScaler(training.device.type)
        return training

    def _batch(self, micro: int) -> Any:
        """A batch of copies of one sample, collated as fake tensors where the collate function reads no values.

        Raises:
            Untraceable: it is sparse.
        """
        collate, batch = self._spec.collate or default_collate, None
        with Caught(), self._fakes:  # a user's function may raise anything over fake tensors
            batch = collate([self._copied(self._sample)] * micro)
        batch = self._copied(collate([self._sample] * micro)) if batch is None else batch
        if any(len(dense_parts(one)) > 1 for one in tensors_in(batch)):
            raise Untraceable("its batches are sparse, and fake tensors do not know how many values those have")
        return batch

    def _step(self, training: Training, watch: Tracer, batch: Any) -> None:
        """Run an optimizer step."""
        self._reached.clear()
        with self._guard():
            watched_step(training, self._task, repeated(training.loader, batch, self._copied), watch)

    def _context(self) -> AbstractContextManager[Any]:
        """The context in which a step's tensors are made."""
        return self._fakes

    def _guard(self) -> AbstractContextManager[None]:
        return _untraceable_because("its step reads values, which fake tensors do not have")

    def _shows(self) -> Shows | None:
        """What shows the operations to a tracer."""
        return lambda sees, phase: self._answers(phase, sees)

    def _answers(self, phase: Phase, sees: Sees | None = None) -> AbstractContextManager[Any]:
        return answers(self._target, self._fakes, phase == Phase.OPTIMIZER, sees)

    def _copied(self, tree: Any) -> Any:
        with FakeCopyMode(self._fakes):
            return copy.deepcopy(tree)


class _Scratch:
    """What kernels take for themselves, as a tracer asks for it."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.possible_bytes = 0
        """Most that one may take beside that."""

    def __call__(self, *operation: Any) -> int | None:
        self.possible_bytes = max(self.possible_bytes, possible_bytes(self._target, *operation))
        return workspace_bytes(self._target, *operation)


class _Tracer(Tracer):
    """Gives up a step that departs from what was expected, and notes which parameters get no gradient."""

    num_expected: int | None = None
    """Allocations expected of the first forward; None where they are not known."""
    given: Collection[Tensor] = ()
    """Parameters that have optimizer state."""
    reached: Collection[int] = ()
    """Ids of parameters that got a gradient."""
    idle: Sequence[Tensor] = ()
    """Parameters with optimizer state that got no gradient."""

    @contextmanager
    def phase(self, phase: Phase, loss: Any = None) -> Iterator[None]:
        """As a tracer's, once it is clear that the step goes on as expected."""
        if phase == Phase.BACKWARD:
            expected, self.num_expected = self.num_expected, None
            if expected not in (None, self.num_forward):
                raise Unlike
        if phase == Phase.OPTIMIZER:
            self.idle = [parameter for parameter in self.given if id(parameter) not in self.reached]
        with super().phase(phase, loss):
            yield


def _reached_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """Ids of the optimizer's parameters that got a gradient, added while backward runs: gradients may be gone when it
    has ended."""
    reached: set[int] = set()
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
        parameter.register_post_accumulate_grad_hook(lambda parameter: reached.add(id(parameter)))
    return reached


def largest_sample(dataset: Any, largest_of: Largest) -> Any:
    """Of these samples, the first whose tensors have most elements."""
    if isinstance(largest_of, tuple):
        return largest(map(dataset.__getitem__, largest_of))
    is_stream = isinstance(dataset, IterableDataset)
    samples = itertools.islice(dataset if is_stream else map(dataset.__getitem__, range(len(dataset))), largest_of)
    return largest(samples)


@contextmanager
def _old_objects_left_alone() -> Iterator[None]:
    """Keep the garbage collector from visiting objects that exist already: a model's took a tenth of the time."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _untraceable_because(what: str) -> Iterator[None]:
    """Whatever is raised over fake tensors may come of their missing values: there is no telling, but of what a
    technique refuses."""
    with Caught(Unlike, PlanError, frames=True) as raised:
        yield
    if raised.error is not None:
        said, name = str(raised.error).strip().splitlines(), type(raised.error).__name__
        raise Untraceable(f"{what}: {name}: {said[0] if said else ''}".rstrip(": ")) from raised.take()
