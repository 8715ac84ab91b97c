"""``autotune.fit``: changes a model in place so that its training fits a memory budget, without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from ..device_memory.context import context_bytes, is_told
from ..errors import AutotuneError, NothingFits, TaskError, UserError
from ..estimates import Cheapest, CheapestOptions
from ..estimates.cards import on_device
from ..plan import Budget, Plan
from ..randomness import undisturbed
from ..ranks import gathered, has_group, this_rank
from ..techniques.allocator import heap_kept_small
from ..units import parse_bytes
from .choices import Techniques, combinations_of, nearest_miss
from .fitted import Fitted, foreseen
from .job import Job
from .whole_batch import Loop, Loss, own_loss


def fit(
    model: nn.Module,
    batch: Any,
    budget: str | int,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    techniques: Techniques | None = None,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    precision: Literal["fp32", "tf32", "bf16", "fp16"] | None = None,
    blocks: Sequence[str] = (),
    dry_run: bool = False,
) -> Fitted:
    """Change a model in place so that a training step on such a batch fits a memory budget, at the least time.

    One step is traced over fake tensors, which takes seconds and no memory to speak of; nothing is trained. Chosen are
    the blocks to recompute and memory-saving layers: what keeps the arithmetic, and the batch. Where the step asks for
    values, which fake tensors do not have, a copy of the model takes real steps on the CPU, three for each choice that
    is looked at.

    Under ``torchrun`` call it in every rank, once the process group is there and before ``DistributedDataParallel``
    wraps the model: all ranks take the choice of the one whose step takes most.

    Args:
        model: on the device that it trains on, or on the CPU or the meta device for another. Not wrapped, compiled or
            sharded; with its modes as it trains.
        batch: as the loop gives it to the model, of the largest shapes that will come: a dict of keywords, a tuple of
            arguments, or what ``loss`` takes.
        budget: what the device may charge the process, ``"8GiB"`` or bytes. A predicted peak times 1.03 stays within.
        loss: (model, batch) -> scalar; None is what the model returns, by itself or as ``.loss``.
        optimizer: of the model's parameters, or a function of them that builds it; None assumes AdamW.
        device: that is planned for; None is the model's.
        techniques: names of those to choose from, or choices of each as a search space has them: ``{"precision":
            [{"kind": "bf16"}]}``. None is recomputed blocks, memory-saving layers, and on a CPU the allocator ``mmap``.
            ``"optimizer_step"`` adds the optimizer's step within backward, for loops that neither clip, log nor
            accumulate gradients; ``"optimizer_state"`` its averages in fewer bits, which rounds them; ``"offload"``
            what blocks save on disk.
        accumulate: batches whose gradients the loop adds up before it steps the optimizer.
        max_grad_norm: what the loop clips the norm of all gradients at; None where it does not.
        precision: what the loop runs in today: bf16 and fp16 by autocast around forward and loss.
        blocks: module paths of the blocks to choose from, or of containers of them; none are found by themselves.
        dry_run: choose, and leave everything as it is. On a CPU glibc's threshold for mappings is no longer its own:
            after every call it is the 32 MiB that it grows to, or a plan's.

    Returns:
        What was chosen, its predicted peak with an interval, and what binds. Compute the loss by ``fitted.loss(model,
        batch)``, or in ``fitted.forward_context()``, where ``fitted.needs_context`` is true.

    Raises:
        NothingFits: no choice fits, with the smallest budget that one does and what binds.
        UserError: the budget is none, or the model lies on several devices or none that is known.
        TaskError: the model does not take the batch, returns no loss, trains nothing, or cannot be copied.
        SpaceError: an unknown technique, or one that changes more than model and optimizer.

        After each of them everything is as it was.
    """
    limit_bytes = _read_budget(budget)
    if type(accumulate) is not int or accumulate < 1:
        raise UserError(f"fit: accumulate: a whole number of batches from 1 on was expected, but got {accumulate!r}.")
    target, is_here = place(model, device)
    loop = Loop(loss or own_loss, accumulate, max_grad_norm, precision, tuple(blocks))
    job = Job(model, batch, optimizer, loop)
    may_free = optimizer is not None and techniques is not None and this_rank().size == 1
    with set_apart(model, target):
        facts = job.facts(target, is_here, limit_bytes)
        combinations, choices = combinations_of(
            techniques, facts, may_free=may_free, batch=loop.batch, has_optimizer=optimizer is not None
        )
        plain = Budget(limit=limit_bytes, device=target)
        options = CheapestOptions(
            **on_device(
                facts.device,
                bool(facts.conv_dims),
                facts.tries_kernels,
                context_bytes=_context_bytes(model) if is_here else None,
            ),
            limit_bytes=max(1, int(limit_bytes / plain.factor)),
            **loop.sizes,
            is_here=target == "cpu" or is_here,
            combinations=combinations,
            choices=choices,
        )
        found = _agreed(lambda: job.choose(options, is_here))
    if found.chosen is None:
        raise NothingFits(f"fit: {nearest_miss(found, options, plain, facts)}")
    plan = Plan(settings=found.chosen.settings, budget=plain, predicted=foreseen(found))
    if not dry_run:
        optimizer = job.apply(plan)
    built = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    return Fitted(plan, model, built, found, facts, not dry_run, tuple(job.notes(found, facts, limit_bytes)), loop)


def _read_budget(budget: str | int) -> int:
    try:
        limit_bytes = parse_bytes(budget)
    except ValueError as error:
        raise UserError(f"fit: budget: {error}") from None
    if limit_bytes <= 0:
        raise UserError(f"fit: budget: bytes above 0 were expected, but got {budget!r}.")
    return limit_bytes


def place(model: nn.Module, device: str | None) -> tuple[Literal["cpu", "cuda"], bool]:
    """The type of the device that is planned for, and whether the model is there already, on a card.

    Raises:
        UserError: there is no such device, or no one device.
        TaskError: it is no model that fit can change.
    """
    if not isinstance(model, nn.Module):
        raise TaskError(f"fit: model: a torch.nn.Module was expected, but got {type(model).__name__}.")
    wrapper = type(model).__name__
    if wrapper.startswith(("FSDP", "Distributed", "DataParallel")) or hasattr(model, "_orig_mod"):
        raise TaskError(
            f"fit: the model is wrapped, sharded or compiled already ({wrapper}), and what fit changes comes before "
            "that. Give the model as it was built."
        )
    found = sorted({str(p.device) for p in model.parameters()})
    has_values = found != ["meta"]  # buffers beside meta parameters may be real
    buffers = {str(one.device) for one in model.buffers() if has_values and one.dim()}  # a number is read anywhere
    if found and len(every := sorted({*found, *buffers})) > 1:
        raise UserError(
            f"fit: the model's parameters and buffers lie on {' and '.join(every)}, and a budget is of one device. "
            "Move them to one."
        )
    if not found:
        raise TaskError("fit: the model has no parameters, so that no step trains it.")
    if not any(p.requires_grad for p in model.parameters()):
        raise TaskError("fit: all parameters of the model are frozen (requires_grad=False): no step trains it.")
    own = found[0].partition(":")[0]
    if device not in (None, "cpu", "cuda") or (own not in ("cpu", "cuda", "meta")):
        raise UserError(f"fit: device: cpu or cuda was expected, but got {device or own}.")
    if device == "cpu" and own == "cuda":
        raise UserError("fit: device: the model is on a CUDA device, and a CPU was asked for. Move it there.")
    target: Literal["cpu", "cuda"] = "cuda" if "cuda" in (device, own) else "cpu"
    return target, own == "cuda"


def _agreed(choose: Callable[[], Cheapest]) -> Cheapest:
    """The choice of the rank whose step takes most as it stands: it fits in all.

    Raises:
        AutotuneError: it could not be made, in one of them.
    """
    ranks = this_rank()
    if ranks.size == 1:
        return choose()
    if not has_group():
        raise UserError(
            f"fit: this is one of {ranks.size} ranks (torchrun), which have to choose alike. Call it once they have "
            "their group: torch.distributed.init_process_group()."
        )
    found: Cheapest | AutotuneError
    try:
        found = choose()
    except AutotuneError as error:
        found = error
    every = gathered(found)
    if isinstance(found, AutotuneError):
        raise found
    for rank, one in enumerate(every):
        if isinstance(one, AutotuneError):
            raise type(one)(f"rank {rank}: {one}")
    largest: Cheapest = max(every, key=lambda one: (one.chosen is None, one.stock.process.high))
    return largest


def _context_bytes(model: nn.Module) -> int | None:
    """What this process's context takes of the model's card; None where that is not known."""
    with torch.cuda.device(next(model.parameters()).device):
        return context_bytes() if is_told() else None


@contextmanager
def set_apart(model: nn.Module, target: Literal["cpu", "cuda"]) -> Iterator[None]:
    """A choice is made within: nothing of it is left in the process, or in the model.

    Raises:
        TaskError: as :func:`_left_alone`.
    """
    kept_small = heap_kept_small() if target == "cpu" else nullcontext()
    try:
        with kept_small, undisturbed(), torch.enable_grad(), _left_alone(model):
            yield
    finally:
        if target == "cuda":  # of a card that was calibrated
            torch.cuda.empty_cache()


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Gradients of the model are the same afterwards.

    Raises:
        TaskError: they were not: the loss goes by this model, and not by the one that it is given.
    """
    before = [(p, p.grad) for p in model.parameters()]
    try:
        yield
    finally:
        changed = [p for p, grad in before if p.grad is not grad]
        for p, grad in before:
            p.grad = grad
    if changed:
        raise TaskError(
            "fit: loss= trained this model itself, and not the one that it is called with. Use its first argument."
        )
