"""``apply(plan, task) -> Training``: the only apply path."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, RandomSampler, default_collate

from ..data.cut import Alike
from ..data.lengths import read_sizes
from ..data.loader import EMPTY, Loader
from ..data.packing import Packing
from ..errors import PlanError, TaskError
from ..plan import Plan
from ..randomness import seed_everything, undisturbed
from ..ranks import ALONE, Ranks, join_ranks, world_size
from ..task import SIGNATURES, Task
from ..techniques import LoaderSpec
from ..techniques.batch import Batch
from ..techniques.support.facts import difference
from ..techniques.support.replica import within
from .apply_pieces import apply_to_loader, apply_to_model, apply_to_optimizer, hold_to_budget, on_two_samples, undo
from .drift import here, is_strict, tell
from .fingerprint import fingerprint, identify
from .forward.inference import Inference
from .halving import CALM_STEPS
from .skip_init import skip_init
from .together import check_can_halve
from .training import Training
from .uneven import with_shares
from .weights import load_weights

_ASSUMED_BATCH = 32


def apply(
    plan: Plan,
    task: Task | None = None,
    *,
    seed: int | None = None,
    strict: bool = False,
    enforce: bool = False,
    halve_when_out_of_memory: bool = False,
    calm_steps: int = CALM_STEPS,
    **pieces: Any,
) -> Training:
    """Build a task's training stack with a plan applied.

    Everything is seeded before ``build_model``. Train and eval modes stay as the user set them.

    Args:
        plan: as read by :func:`autotune.load_plan`; ``Plan(settings=Settings())`` is the user's job as it stands.
        task: the task, or ``pieces``.
        seed: of everything random, the order of samples included; None is the seed that the plan was found with, or 0.
        strict: refuse a plan that was measured with another torch, device or number of threads; else that is a warning.
        enforce: on CUDA, refuse this process memory beyond the plan's budget to its end, as a device of that size
            would; else the budget is lifted, with a line that says so, where a step needs more.
        halve_when_out_of_memory: where memory runs out in ``Training.step``, go on with half the micro-batch and twice
            as many of them to an optimizer step, with a warning; all ranks together. A step's batches stay in memory
            until it is taken.
        calm_steps: optimizer steps without a lack of memory after which the halved micro-batch is doubled again; twice
            as many each time that memory runs out before they have passed.
        **pieces: ``model=``, ``dataset=`` (or ``build_loader=``), ``loss=`` (a ``compute_loss``; ``infer=`` of a plan
            for inference), optionally
            ``optimizer=`` (built, or a function of the parameters), and any other field of :class:`autotune.Task`.

    Returns:
        The training: ``model``, ``optimizer``, ``loader`` and ``step``. Of a plan for inference, an
        :class:`~autotune.training.forward.inference.Inference`: ``model``, ``loader`` and ``infer``.

    Raises:
        PlanError: the plan is for another model or number of processes, or asks for what this model or device cannot
            do; or the optimizer was built of parameters that it replaces; or ``strict`` finds a difference.
        TaskError: the task's pieces do not fit together.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"apply takes a Plan, but got {type(plan).__name__}. Use autotune.load_plan(path).")
    in_pieces = task is None
    if task is None:
        task = _task_of(pieces, "loss" if plan.inference is None else "infer")
    elif pieces:
        raise TaskError(f"apply takes a task, or pieces of one, but got both: {', '.join(pieces)}. Pass one of them.")
    device, ranks = _place(plan)
    if device.type == "cuda":
        hold_to_budget(plan, enforce, repeats=ranks.size == 1)
    if plan.inference is not None:
        task = task.for_inference()
    else:
        task.check_trains()
    settings = plan.settings.in_force(task.precision)
    in_force = plan.model_copy(update={"settings": settings})
    seed = seed if seed is not None else plan.search.seed if plan.search else 0
    seed_everything(seed)
    made = settings.on_task(task)
    model = build_model(made)
    before = [weakref.ref(parameter) for parameter in model.parameters()]
    dataset = task.build_dataset()
    _check_task(in_force, task, model if made is task else None, dataset, device)
    batch = settings.batch or _shared_out(reference_batch(task, dataset), settings.parallel.num_shares)
    if batch.flag is not None:
        raise PlanError(f"settings.batch.flag: a task has no flag {batch.flag}: the plan is a script's. Leave it out.")
    ranks = with_shares(ranks, settings.parallel, batch, model)
    if (reason := settings.having(batch).conflict()) is not None:
        raise PlanError(f"settings: {reason}.")
    _check_environment(plan, device.type, is_strict(strict))
    if calm_steps < 1:
        raise PlanError(f"calm_steps: at least 1 optimizer step was expected, but got {calm_steps}.")
    if task.infers and (reason := settings.needs_training()) is not None:
        raise PlanError(f"settings.{reason}")
    if halve_when_out_of_memory and task.infers:
        raise PlanError("halve_when_out_of_memory: it repeats optimizer steps, and a plan for inference has none.")
    if halve_when_out_of_memory:
        check_can_halve(settings.having(batch), model, world_size())

    run = on_two_samples(dataset, task.collate or default_collate, task.compute_loss)
    model = apply_to_model(in_force, model, blocks=task.blocks, run=run, device=device)
    optimizer = task.make_optimizer(within(model))
    if not task.infers:
        optimizer = apply_to_optimizer(in_force, optimizer, max_grad_norm=task.max_grad_norm)
    _check_optimizer(optimizer, model, before)
    num_samples = settings.parallel.effective or batch.num_samples
    if not task.infers:
        _warn_of_batch(task, dataset, num_samples, stated=settings.batch is not None and not in_pieces)
    packing = Packing(task.collate, task.pack, task.compute_loss)
    collate = packing.row_of if batch.packed else task.collate
    spec = apply_to_loader(in_force, dataset, collate=collate, options=task.loader_options, device=device)
    loader = build_loader(task, spec, batch, seed, ranks)
    if batch.packed:
        packing.check(within(model), loader, settings)
    if ranks.rank:
        seed_everything(seed + ranks.rank)  # dropout and augmentation of its own; rank 0 has those of one process
    applied = settings.as_applied(within(model))
    kind = Inference if task.infers else Training
    training = kind(model, optimizer, loader, task, applied, halve_when_out_of_memory, calm_steps)
    training.evaluation_batch = plan.evaluation_batch or task.evaluation_batch(batch.micro)
    return training


def build_model(task: Task) -> nn.Module:
    """The user's model, with the weights that its task names.

    Raises:
        TaskError: ``build_model`` returned something else, or the weights are another model's.
    """
    model = task.build_model()
    if not isinstance(model, nn.Module):
        raise TaskError(
            f"{task.source or 'task'}: build_model returned {type(model).__name__}. "
            f"Wanted: {SIGNATURES['build_model']}."
        )
    load_weights(task, model)
    return model


def build_loader(task: Task, spec: LoaderSpec, batch: Batch, seed: int = 0, ranks: Ranks = ALONE) -> Loader:
    """A loader over micro-batches, in the user's order or a seeded shuffle; of one of several ranks, over its share.

    An iterable dataset gets at most one worker unless it says that it splits itself between them.

    Raises:
        TaskError: the dataset is empty, or ``build_sampler`` returned a batch sampler, or one of a rank's share.
        PlanError: an iterable dataset cannot be cut into uneven micro-batches, nor between ranks.
    """
    if isinstance(spec.dataset, IterableDataset):
        return Loader(spec if task.shards_by_worker else _with_one_worker(spec), batch, None, ranks)
    if len(spec.dataset) == 0:
        raise TaskError(EMPTY)
    if batch.tokens is not None and spec.lengths is None:
        spec = dataclasses.replace(spec, lengths=_lengths(task, spec))
    if task.build_sampler is None:
        shuffle = RandomSampler(spec.dataset, generator=torch.Generator().manual_seed(seed))
        return Loader(spec, batch, shuffle, ranks)
    sampler = task.build_sampler(spec.user_dataset)
    if isinstance(sampler, BatchSampler):
        raise TaskError(
            "build_sampler returned a BatchSampler, but the batch size is decided here. Return a sampler of indices."
        )
    if not isinstance(sampler, Iterable):
        raise TaskError(f"build_sampler returned {type(sampler).__name__}. Wanted: {SIGNATURES['build_sampler']}.")
    if isinstance(sampler, DistributedSampler) and ranks.size > 1:
        raise TaskError(
            "build_sampler returned a DistributedSampler, but samples are shared out between the processes here. "
            "Return a sampler over the whole dataset, the same in every process."
        )
    return Loader(spec, batch, Alike(sampler, seed) if ranks.size > 1 else sampler, ranks)


def _check_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, before: Sequence[weakref.ref[nn.Parameter]]
) -> None:
    """
    Args:
        optimizer: of the task.
        model: with the plan.
        before: the parameters that it had without.

    Raises:
        PlanError: the optimizer would step one that the model no longer has, which nothing trains.
    """
    replaced = {id(one) for one in (ref() for ref in before) if one is not None}
    replaced -= {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) in replaced for group in optimizer.param_groups for parameter in group["params"]):
        raise PlanError(
            "settings: the plan gives the model other parameters than those that the optimizer was built with. Give "
            "apply a function that builds it: optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)."
        )


def _lengths(task: Task, spec: LoaderSpec) -> list[int]:
    """Of all samples, by index.

    Raises:
        TaskError: ``length`` raised, or said what cannot be.
        PlanError: samples have no one length.
    """
    found = read_sizes(spec.user_dataset, task.collate, task.length)
    lengths = found.lengths() if found is not None and found.is_whole else None
    if found is None or lengths is None:
        raise PlanError(
            "settings.batch.tokens: samples are to be cut by their lengths, but they differ in other sizes than their "
            "first dimension. Give length(sample) in the task, or leave tokens out."
        )
    return lengths[found.places.argsort()].tolist()


def _with_one_worker(spec: LoaderSpec) -> LoaderSpec:
    workers = spec.options.get("num_workers", 0)
    if workers <= 1:
        return spec
    warnings.warn(
        f"{workers} loader workers on an iterable dataset would read every sample {workers} times; 1 is used. "
        "Set shards_by_worker = True if the dataset splits itself.",
        stacklevel=4,
    )
    return dataclasses.replace(spec, options={**spec.options, "num_workers": 1})


def reference_batch(task: Task, dataset: Any, effective: int | None = None) -> Batch:
    """The job's batch: ``effective`` or ``batch_size``, else 32; never more than the dataset holds; in
    micro-batches of ``micro_batch_size``.

    Raises:
        TaskError: a stream cannot be cut so.
    """
    size = effective or task.batch_size or _ASSUMED_BATCH
    micro = task.micro_batch_size or size
    if not isinstance(dataset, IterableDataset):
        size = max(1, min(size, len(dataset)))
    elif size % min(micro, size):
        raise TaskError(
            f"{task.source or 'task'}: an iterable dataset is read in equal micro-batches, but {size} samples a step "
            f"are no multiple of micro_batch_size = {micro}. Use one that divides them."
        )
    return Batch.of(size, micro)


def _task_of(pieces: dict[str, Any], what: Literal["loss", "infer"]) -> Task:
    needed = ("model", what) if "build_loader" in pieces else ("model", "dataset", what)
    missing = [name for name in needed if name not in pieces]
    if missing:
        raise TaskError(f"apply needs a task, or model=, dataset= and {what}=; missing: {', '.join(missing)}.")
    model = pieces.pop("model")
    if "loss" in pieces:
        pieces["compute_loss"] = pieces.pop("loss")
    if "dataset" in pieces:
        dataset = pieces.pop("dataset")
        pieces["build_dataset"] = lambda: dataset
    optimizer = pieces.pop("optimizer", None)
    build = (lambda parameters: optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    try:
        return Task(build_model=lambda: model, build_optimizer=build, **pieces)
    except TypeError as error:
        raise TaskError(f"apply: {error}. Pass fields of autotune.Task.") from None


def _place(plan: Plan) -> tuple[torch.device, Ranks]:
    """The device that this process trains on, and its rank.

    Raises:
        PlanError: there is no such device, or the plan is for another number of processes.
    """
    if plan.budget.device == "cuda" and not torch.cuda.is_available():
        raise PlanError(
            "budget.device: the plan is for cuda, but torch sees no CUDA device here. "
            "Run it where there is one, or search again with --device cpu."
        )
    is_cuda = plan.budget.device != "cpu" and torch.cuda.is_available()
    if (reason := plan.settings.parallel.other_size(world_size())) is not None:
        raise PlanError(reason)
    ranks = join_ranks(torch.device("cuda" if is_cuda else "cpu"))
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu"), ranks


def _shared_out(batch: Batch, num_shares: int) -> Batch:
    """The job's own batch, with at least one micro-batch for each share."""
    if batch.accumulate % num_shares == 0:
        return batch
    return Batch.of(batch.num_samples, min(batch.micro, -(-batch.num_samples // num_shares)))


def _check_task(plan: Plan, task: Task, model: nn.Module | None, dataset: Any, device: torch.device) -> None:
    """
    Args:
        plan: applied.
        task: as it stands.
        model: that it builds; None builds it, without values.
        dataset: that it builds.
        device: where the model goes.

    Raises:
        PlanError: the plan was found for another, or cannot be had on what an earlier one left.
    """
    if plan.task is None:
        return
    if model is None:
        with undisturbed():
            model = build_model(skip_init(task))
    undo(plan, model, device)  # a notebook's may have an earlier plan; names are those of what was built
    if fingerprint(model, dataset, task.collate) != plan.task.fingerprint:
        found, identity = identify(model, dataset, task.collate, task.blocks)
        raise PlanError(
            f"task.fingerprint: the plan was found for {plan.task.source} ({plan.task.fingerprint[:19]}…), but this "
            f"model is another ({found[:19]}…): {difference(plan.task.identity, identity)}. Search again for this "
            "model, or give the one that the plan was found for."
        )


def _warn_of_batch(task: Task, dataset: Any, num_samples: int, stated: bool) -> None:
    """Warn if an optimizer step has another number of samples than the job's, or if that number is not given."""
    if task.batch_size is None and not stated:
        warnings.warn(
            f"the optimizer steps on batches of {num_samples}, and nothing says what the job trains with. Give "
            "batch_size, to apply or in the task file, and it is held against the plan's.",
            stacklevel=3,
        )
    if task.batch_size is not None and num_samples != (wanted := reference_batch(task, dataset).num_samples):
        warnings.warn(
            f"an optimizer step of the plan sees {num_samples} samples, and the task's batch size is {wanted}. "
            "Search again to hold that, or set batch_size to the plan's.",
            stacklevel=3,
        )


def _check_environment(plan: Plan, kind: str, strict: bool) -> None:
    """
    Raises:
        PlanError: ``strict``, and the plan was measured elsewhere.
    """
    if found := [*here(plan, kind)]:
        if strict:
            raise PlanError(tell(found, strict))
        warnings.warn(tell(found, strict), stacklevel=3)
    for technique in plan.settings.techniques():
        if reason := technique.not_in_force():
            warnings.warn(
                f"{technique.name}: {reason}. Start the job with `autotune run plan.yaml -- python train.py`.",
                stacklevel=3,
            )
