"""``Rehearsal``: a training copied into tensors without values, whose steps allocate as real ones do.

Source: torch's FakeTensorMode, https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.data import IterableDataset, default_collate

from ..apply_plan import apply, build_loader
from ..loader import Loader, Position, tensors_in
from ..measure.allocations import Trace
from ..measure.tracer import Tracer
from ..measure.watch import Watch
from ..plan import Plan
from ..task import Task
from ..techniques.batch import Batch
from ..training import Training
from .kernels import Kernel
from .scratch import kernel_of

__all__ = ["Rehearsal", "Rehearsed", "Untraceable"]


class Untraceable(Exception):
    """A training cannot run over tensors without values; the message says where it asked for one."""


@dataclass(frozen=True)
class Rehearsed:
    """An optimizer step at one batch."""

    trace: Trace
    """Its allocations, kernels' scratch among them."""
    kernels: tuple[Kernel, ...]
    """Whose scratch that is, in order."""


class Rehearsal:
    """Runs optimizer steps of ``apply(plan, task)`` over fake tensors: no device, no forward, whatever the batch."""

    def __init__(self, plan: Plan, task: Task, largest_of: int = 1) -> None:
        """
        Args:
            plan: applied on the CPU; its batch does not matter.
            task: what it is applied to.
            largest_of: every batch repeats the largest of so many samples, so that shapes do not vary with its size.

        Raises:
            Untraceable: the model or its optimizer cannot be copied.
            Exception: whatever the user's code raises.
        """
        self._task = task
        self._real = apply(plan, task)
        self._sample = _largest_sample(self._real.loader, largest_of)
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            self._model, self._optimizer = self._copied((self._real.model, self._real.optimizer))
        except Exception as error:
            raise _untraceable("its model or optimizer cannot be copied", error) from error

    def step(self, micro: int, accumulates: bool = False) -> Rehearsed:
        """The allocations of a steady optimizer step.

        Args:
            micro: samples in one forward pass, >= 1.
            accumulates: trace two micro-batches, the second of which finds gradients; further ones are like it.

        Raises:
            Untraceable: the model, the loss or backward asks for a value.
        """
        training = self._training(Batch(micro=micro, accumulate=2 if accumulates else 1))
        batch = self._batch(micro)
        with self._fakes:
            if not self._optimizer.state:
                self._step(training, Watch(), batch)
            scratch = _Scratch()
            tracer = Tracer(training.model, training.optimizer, training.device, scratch_of=scratch)
            self._step(training, tracer, batch)
        return Rehearsed(tracer.trace(), tuple(scratch.kernels))

    def _training(self, batch: Batch) -> Training:
        loader = build_loader(self._task, self._real.loader.spec, batch)
        training = Training(self._model, self._optimizer, loader, self._task.compute_loss, self._real.settings)
        if training.scaler.is_enabled():
            training.scaler = _SteadyScaler(training.device.type)
        return training

    def _batch(self, micro: int) -> Any:
        """So many copies of the sample, collated without their values where the collate function reads none."""
        collate = self._real.loader.spec.collate or default_collate
        try:
            with self._fakes:
                return collate([self._copied(self._sample)] * micro)
        except Exception:  # noqa: BLE001 - a user's function may raise anything over tensors without values
            return self._copied(collate([self._sample] * micro))

    def _step(self, training: Training, watch: Watch, batch: Any) -> None:
        num_micro = training.batch.accumulate
        try:
            with watch:
                for number in range(num_micro):
                    arrived = self._copied(batch)
                    watch.batch(arrived)
                    training.loader.position = Position(training.batch.micro, number == num_micro - 1, number == 0)
                    with _Answers(), watch.phase("forward"), training.forward_context():
                        loss = self._task.compute_loss(training.model, arrived)
                    with _Answers(), watch.phase("backward", loss):
                        training.backward(loss)
                with _Answers(is_optimizer=True), watch.phase("optimizer"):
                    training.optimizer_step()
        except Exception as error:
            raise _untraceable("its step asks for what tensors without values do not have", error) from error

    def _copied(self, tree: Any) -> Any:
        with FakeCopyMode(self._fakes):
            return copy.deepcopy(tree)


class _Scratch:
    """Says what each kernel takes for itself, and remembers the kernels."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []

    def __call__(self, func: Any, args: Any, kwargs: Any, results: Any) -> int | None:
        kernel = kernel_of(func, args, kwargs, results)
        if kernel is None:
            return None
        self.kernels.append(kernel)
        return kernel.num_bytes()


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what tensors without values cannot: which attention kernel a CPU takes, by their shapes; and in the
    optimizer, whatever value it reads (its number of steps, by which it corrects its averages) is 1."""

    def __init__(self, is_optimizer: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_optimizer = is_optimizer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and self._is_optimizer:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is torch.ops.aten._fused_sdp_choice.default:
            with unset_fake_temporarily():
                args, kwargs = tree_map_only(Tensor, _empty_like, (args, kwargs or {}))
                return func(*args, **kwargs)
        return func(*args, **(kwargs or {}))


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, requires_grad=x.requires_grad)


class _SteadyScaler(torch.amp.GradScaler):
    """A loss scaler whose gradients are finite, without looking."""

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step()

    def update(self, new_scale: Any = None) -> None:
        self._per_optimizer_states.clear()

    def get_scale(self) -> float:
        return 1.0


def _largest_sample(loader: Loader, largest_of: int) -> Any:
    dataset = loader.spec.dataset
    is_stream = isinstance(dataset, IterableDataset)
    samples = itertools.islice(dataset if is_stream else map(dataset.__getitem__, range(len(dataset))), largest_of)
    return max(samples, key=lambda sample: sum(tensor.numel() for tensor in tensors_in(sample)))


def _untraceable(what: str, error: Exception) -> Untraceable:
    said = str(error).strip().splitlines()
    return Untraceable(f"{what}: {type(error).__name__}: {said[0] if said else ''}".rstrip(": "))
