"""``Job``: a user's model with one of its batches, for which settings are chosen, and which they are put on."""

from __future__ import annotations

import ctypes
import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import AutotuneError, Caught, PlanError, TaskError
from ..estimates import Cheapest, CheapestOptions
from ..estimates.allocators.process import resident_bytes as settle_process
from ..estimates.cheapest import cheapest
from ..estimates.memory_model import MemoryModel
from ..estimates.memory_model_cache import WITHOUT_TRACE, MemoryModelCache
from ..estimates.tracing.fake_step import Untraceable
from ..estimates.tracing.real_step import ProbedModel
from ..measure import InspectOptions
from ..measure.dataset import DatasetFacts
from ..measure.facts import build_facts
from ..measure.processes import beside_bytes, own_peak_bytes, resident_bytes
from ..nested import dense_parts, tensors_in, to_device
from ..plan import Plan
from ..randomness import undisturbed
from ..ranks import by_itself, this_rank
from ..task import Task
from ..techniques import Device, Facts, Settings
from ..training.apply_pieces import apply_to_model, apply_to_optimizer
from ..units import ceil_mib, format_bytes
from .fitted import left_out
from .stand_in import StandIns
from .whole_batch import Loop, own_loss, probed_task, traced_task

_MOST_DRIFT = 2**20
"""Bytes that the choice itself may leave in the process before it is made once more."""


class _ReadsValues(Exception):
    """The step cannot be traced; the message says where it asked for a value."""


class Job:
    """The user's model with one of its batches."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None,
        loop: Loop,
        goes_on: bool = True,
        held: tuple[Tensor, ...] = (),
    ) -> None:
        """
        Args:
            model: the user's.
            batch: one of the loop's.
            optimizer: of the model's parameters, or a function of them; None is AdamW.
            loop: what it does.
            goes_on: whether the training goes on in this process, with what a choice leaves in it.
            held: of a step, by the loop; they are traced.
        """
        self._goes_on, self._held = goes_on, held
        self._model, self._batch, self._optimizer, self._loop = model, batch, optimizer, loop
        self._stand_ins = StandIns(model, optimizer)
        self._num_ranks = this_rank().size
        if isinstance(optimizer, torch.optim.Optimizer):
            own = {id(p) for p in model.parameters()}
            if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                raise TaskError(
                    "fit: the optimizer has none of the model's parameters. Build it from model.parameters()."
                )

    def facts(self, target: Literal["cpu", "cuda"], is_here: bool, limit_bytes: int) -> Facts:
        """Of the model, its optimizer and the device that is planned for."""
        task = self._task
        facts = build_facts(
            self._model,
            [self._batch],
            DatasetFacts([], None, None, deterministic=False, stackable=False, shapes_vary=False),
            task.make_optimizer(task.build_model()),
            self._loop.batch,
            InspectOptions(runs_model=False, allow_lossy=False),
            "cuda" if is_here else "cpu",
            self._loop.blocks,
            fingerprint="",
            shards_by_worker=False,
            loader_options={},
            loader_samples_per_s={},
            effective_batch_held=True,
            effective_batch_assumed=False,
            max_grad_norm=self._loop.max_grad_norm,
            precision=self._loop.precision,
            split_error=None,
        )
        if target == "cpu" or is_here:
            return facts
        name = f"a CUDA device of {format_bytes(limit_bytes)}"
        device = Device(type="cuda", name=name, memory_bytes=limit_bytes, bf16=True)
        return facts.model_copy(update={"device": device})

    @cached_property
    def _task(self) -> Task:
        return traced_task(self._stand_ins, self._batch, self._loop)

    def choose(self, options: CheapestOptions, is_here: bool) -> Cheapest:
        """Choose by traces; by real steps where there can be none.

        Raises:
            TaskError: the model does not take the batch.
        """
        with by_itself():
            try:
                return self._by_traces(options, is_here)
            except _ReadsValues as reason:
                said = str(reason)
            task = probed_task(self._stand_ins, self._batch, self._loop)
            sizes = {"reference_batch": task.batch_size, "reference_micro": task.micro_batch_size}
            with Caught(AutotuneError, MemoryError) as raised:
                asked, base_bytes = self._beside(options.model_copy(update=sizes), is_here)
                found = cheapest(task, asked, base_bytes, _Probed(task, None, options.target))
                return found.model_copy(update={"reason": said})
            error = raised.take()
            why = f"{type(error).__name__}: {error}"
            if self._goes_on:
                raise TaskError(f"fit: the model does not take this batch: {why}") from error
            raise TaskError(
                f"the script's step cannot be made again as it was seen: {why}. `autotune search` measures it."
            ) from error

    def _by_traces(self, options: CheapestOptions, is_here: bool) -> Cheapest:
        task, memory_models = self._task, _Traced(self._task, None, options.target)
        if options.target == "cuda":
            with torch.cuda.device(next(self._model.parameters()).device) if is_here else nullcontext():
                return cheapest(task, *self._beside(options, is_here), memory_models)
        settle_process(Settings())  # pages of kernels, and what threads take
        before = _resident_bytes()
        found = cheapest(task, *self._beside(options, is_here, before), memory_models)
        if not self._goes_on or (after := _resident_bytes()) - before < _MOST_DRIFT:
            return found
        return cheapest(task, *self._beside(options, is_here, after), memory_models)

    def _beside(
        self, options: CheapestOptions, is_here: bool, resident: int | None = None
    ) -> tuple[CheapestOptions, int | None]:
        """With what the device charges this process beside the tensors of a step: as a part of a card's context, or as
        bytes, of those that are resident on a CPU."""
        kind = options.target
        optimizer = self._optimizer if isinstance(self._optimizer, torch.optim.Optimizer) else None
        state = [] if optimizer is None else [*optimizer.state.values()]
        grads = [p.grad for p in self._model.parameters() if p.grad is not None]
        more_tensors = tensors_in([self._batch, state, grads, self._held])
        tensors = itertools.chain(self._model.parameters(), self._model.buffers(), more_tensors)
        parts = itertools.chain.from_iterable(map(dense_parts, tensors))
        there = (one.untyped_storage() for one in parts if one.device.type == kind)
        own = sum({one._cdata: one.nbytes() for one in there}.values())
        gradients = sum(p.numel() * p.element_size() for p in self._model.parameters() if p.requires_grad)
        more = gradients if self._num_ranks > 1 else 0  # buckets of DistributedDataParallel are a copy of them
        if kind == "cpu":
            taken = _resident_bytes() if resident is None else resident
            below = 0 if self._goes_on else beside_bytes()  # a script's loader workers, as a trial counts them
            return options, max(0, taken - own) + below + more
        more += max(0, torch.cuda.memory_allocated() - own) if is_here else 0
        return options.model_copy(update={"context": options.context.plus(more)}), None

    def apply(self, plan: Plan) -> torch.optim.Optimizer | None:
        """Put the plan on model and optimizer; the optimizer, built if it was given as a function.

        Raises:
            PlanError: it cannot be put there. Nothing of it is left then.
        """
        given, stock = self._optimizer, Plan(settings=Settings())

        def run(model: nn.Module) -> Any:
            with undisturbed():
                return self._loop.loss(model, to_device(self._batch, next(model.parameters()).device))

        try:
            apply_to_model(plan, self._model, blocks=self._loop.blocks, run=run)
            if given is None:
                return None
            built = given if isinstance(given, torch.optim.Optimizer) else self._task.make_optimizer(self._model)
            return apply_to_optimizer(plan, built, max_grad_norm=self._loop.max_grad_norm)
        except AutotuneError:
            apply_to_model(stock, self._model)
            if isinstance(given, torch.optim.Optimizer):
                apply_to_optimizer(stock, given)
            raise

    def notes(self, found: Cheapest, facts: Facts, limit_bytes: int) -> Iterator[str]:
        """What a reader must know."""
        if found.how == "probed":
            yield f"by real steps of a copy of the model, three for each choice, since {found.reason}"
        if self._optimizer is None:
            yield "no optimizer was given: AdamW is assumed"
        yield from left_out(found, facts)
        assert found.chosen is not None, "else it is an error"
        if any(one.has_context for one in found.chosen.settings.chosen()) and self._loop.loss is not own_loss:
            yield "compute the loss by fitted.loss(model, batch), or in fitted.forward_context()"
        if found.chosen.process.value < own_peak_bytes() > limit_bytes and next(self._model.parameters()).is_cpu:
            yield (
                f"the process has taken {format_bytes(ceil_mib(own_peak_bytes()))} before this, more than the budget: "
                "what is predicted is from here on"
            )


class _Traced(MemoryModelCache):
    """Keeps what was traced, whatever the allocator, and takes no real steps in its place."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._known: dict[tuple[str, bool, int | None], MemoryModel] = {}
        self.replayed = {}

    def of(self, plan: Plan, accumulates: bool, few: int | None = None) -> MemoryModel:
        """As its base has it.

        Raises:
            _ReadsValues: the first one asked for cannot be traced.
            PlanError: another cannot.
        """
        plan = plan.model_copy(update={"settings": plan.settings.stock(*WITHOUT_TRACE)})
        key = plan.settings.canonical(), accumulates, few
        if key not in self._known:
            try:
                self._known[key] = super().of(plan, accumulates, few)
            except Untraceable as error:
                raise (PlanError if self._known else _ReadsValues)(str(error)) from None
        return self._known[key]


class _Probed(MemoryModelCache):
    """Takes real steps."""

    def probed(self, plan: Plan, accumulates: bool) -> MemoryModel | ProbedModel:
        """As its base has it.

        Raises:
            PlanError: the step runs as it stands, and not so.
            Exception: whatever the user's code raises as it stands.
        """
        if not self._probed:
            return super().probed(plan, accumulates)
        with Caught(PlanError) as raised:
            return super().probed(plan, accumulates)
        error = raised.take()
        raise PlanError(f"{type(error).__name__}: {error}") from error


def _resident_bytes() -> int:
    """Of this process now, once what is free is given back; its peak where the system does not tell."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return resident_bytes() or own_peak_bytes()
