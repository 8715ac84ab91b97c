"""``inspect_task``: the facts of a task before any trial."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import IterableDataset, default_collate

from ..data.own_loader import OwnLoader
from ..data.packing import FEW, Packing
from ..errors import TaskError
from ..randomness import seed_everything
from ..task import Task
from ..techniques import Facts, LoaderSpec
from ..techniques.batch import Batch, refused_split
from ..techniques.models.variant import Variant
from ..techniques.precision import refused
from ..techniques.support.facts import Lengths, num_processors
from ..training.apply_plan import build_loader, build_model, reference_batch
from ..training.fingerprint import identify
from ..training.out_of_memory import is_out_of_memory
from ..training.skip_init import skip_init
from .checks.outputs import measure_forward
from .checks.refused import without_refused
from .checks.split import Split, measure_split
from .dataset import DatasetFacts, inspect_dataset
from .device import inspect_device
from .facts import build_facts
from .lengths import as_runs, find_lengths
from .measurement import InspectOptions
from .memory import process_bytes
from .timing.loading import LoaderRates, loader_rates

_NOT_RUN = "the model was not run"


def inspect_task(task: Task, options: InspectOptions, device: Literal["cpu", "cuda"]) -> Facts:
    """Build the model and the dataset, read a few samples; unless told otherwise, run one batch forward and backward
    and time the loader.

    Args:
        task: as loaded.
        options: what the user said.
        device: torch's device type.

    Raises:
        TaskError: the dataset is empty, a piece returns what it must not, or the device cannot do what the task states.
        NonFiniteLoss: the first loss is NaN or infinite.
        Exception: whatever the user's code raises.
    """
    charged_bytes = process_bytes(torch.device(device))
    if options.runs_model and (reason := refused(task.precision, inspect_device(device))) is not None:
        raise TaskError(f"{task.source or 'task'}: {reason}")
    if options.inference:
        task = task.for_inference()
    seed_everything(0)
    model = build_model(task if options.runs_model else skip_init(task))
    dataset = task.build_dataset()
    data = inspect_dataset(task, dataset)
    lengths = _lengths(task, dataset, data, model if options.runs_model else None)
    found_fingerprint, identity = identify(model, dataset, task.collate, task.blocks)
    model = model.to(device) if options.runs_model else model
    batch = reference_batch(task, dataset, options.effective_batch)
    split = _split(task, model, data, device) if options.runs_model else Split(None, _NOT_RUN, 0.0)
    spec = LoaderSpec(dataset, task.collate, dict(task.loader_options), torch.device(device), user_dataset=dataset)
    most_workers = 1 if isinstance(dataset, IterableDataset) and not task.shards_by_worker else num_processors()
    own = isinstance(dataset, OwnLoader)
    has_rates = options.runs_model and not own
    rates = (
        loader_rates(task, spec, batch, 0 if data.on_device else most_workers, split.samples_per_s)
        if has_rates
        else LoaderRates()
    )
    loader_options = build_loader(task, spec, batch).options if own else task.loader_options
    facts = build_facts(
        model,
        dataset,
        data,
        task.make_optimizer(model),
        batch,
        options,
        device,
        blocks=task.blocks,
        fingerprint=found_fingerprint,
        identity=identity,
        process_bytes=charged_bytes,
        lengths=lengths,
        variants=_variants(task) if options.allow_lossy else {},
        shards_by_worker=task.shards_by_worker or own,
        own_loader=own,
        even_batches=task.even_batches,
        loader_options={k: v for k, v in loader_options.items() if isinstance(v, (int, bool))},
        loader_samples_per_s=rates.by_workers,
        loader_bytes=rates.bytes_by_workers,
        step_samples_per_s=split.samples_per_s if options.runs_model else None,
        effective_batch_held=(options.effective_batch or (None if task.infers else task.batch_size)) is not None,
        effective_batch_assumed=(options.effective_batch or task.batch_size) is None,
        precision=task.precision,
        max_grad_norm=task.max_grad_norm,
        acts_after_step=task.after_step is not None,
        own_autocast=split.own_autocast,
        split_error=split.error,
        split_rounded=split.rounded,
        inference=task.infers,
        evaluates=task.evaluate is not None,
        evaluation_batch=None if task.infers else task.evaluation_batch(batch.micro),
        warnings=(*_warnings(task, options, model, data, split), *rates.notes),
    )
    found_out = {
        "no_packing": _no_packing(task, model, data, facts, options.runs_model),
        "warnings": (*facts.warnings, *filter(None, [refused_split(facts)])),
    }
    return without_refused(task, dataset, facts.model_copy(update=found_out), options.tries)


def _lengths(task: Task, dataset: Any, data: DatasetFacts, model: nn.Module | None) -> Lengths | None:
    """Read where samples were seen to differ, or may: ``length`` is given, or a collate function that pads.

    Raises:
        TaskError: ``length`` raised, or said what cannot be.
        Exception: whatever the user's dataset raises.
    """
    if not (data.shapes_vary or task.length or task.collate) or isinstance(dataset, OwnLoader):
        return None
    found = find_lengths(task, dataset, data.deterministic)
    if found is None or model is None:
        return found
    collate = task.collate or default_collate
    return as_runs(
        found, lambda places: collate([dataset[place] for place in places]), partial(task.compute_loss, model)
    )


def _no_packing(task: Task, model: nn.Module, data: DatasetFacts, facts: Facts, runs_model: bool) -> str | None:
    """Why samples cannot be packed. They are computed only where they could be otherwise."""
    if task.infers or not Batch.may_pack(facts):
        return facts.no_packing
    if not runs_model:
        return _NOT_RUN
    if len(data.samples) < FEW:
        return f"{FEW} samples are computed both ways, but the batch has fewer"
    packing = Packing(task.collate, task.pack, task.compute_loss)
    try:
        return packing.obstacle(model, data.samples[:FEW], torch.device(facts.device.type))
    except (MemoryError, torch.OutOfMemoryError):
        return "the device does not hold a few samples, computed both ways without techniques"


def _variants(task: Task) -> dict[str, int]:
    """Parameters of each variant.

    Raises:
        TaskError: one is no model.
        Exception: whatever the user's code raises.
    """
    tasks = {name: Variant(kind=name).on_task(skip_init(task)) for name in task.variants}
    return {name: sum(p.numel() for p in build_model(one).parameters()) for name, one in tasks.items()}


def _split(task: Task, model: nn.Module, data: DatasetFacts, device: str) -> Split:
    """Compare gradients, with fewer samples where the device cannot hold the batch's activations: trials may hold them
    by recomputing."""
    samples = data.samples
    measured = measure_forward if task.infers else measure_split
    while True:
        try:
            return measured(task, model, samples, torch.device(device))
        except (RuntimeError, MemoryError) as error:
            if len(samples) == 1 or not is_out_of_memory(error):
                raise
        model.zero_grad()
        samples = samples[: len(samples) // 2]


def _warnings(task: Task, options: InspectOptions, model: nn.Module, data: DatasetFacts, split: Split) -> list[str]:
    found = []
    if task.build_loader is not None:
        found.append("the task builds its loaders itself (build_loader): data_loading is left as it is there")
    if beside := [name for name in ("after_backward", "after_step") if getattr(task, name) is not None]:
        found.append(f"what {' and '.join(beside)} keeps in memory is measured, and not predicted")
    asked = options.effective_batch or task.batch_size
    if asked is not None and data.length is not None and data.length < asked:
        found.append(f"the dataset has {data.length} samples, fewer than the batch size of {asked}, and caps it")
    if not task.infers and not any(module.training for module in model.modules()):
        found.append("the whole model is in eval mode: dropout is off, BatchNorm is frozen; build_model decides")
    if not task.infers and not any(p.requires_grad for p in model.parameters()):
        found.append("no parameter of the model trains")
    if split.own_autocast:
        rounding = "" if task.infers else ", and its rounding is not taken for a changed gradient"
        found.append(f"the model turns autocast on by itself: precision is left to it{rounding}")
    if split.error is None:
        found.append(f"whether splitting a batch changes the gradient could not be measured: {split.reason}")
    workers = task.loader_options.get("num_workers", 0)
    if data.length is None and workers > 1 and not task.shards_by_worker:
        found.append(f"loader_options asks for {workers} workers on a stream that does not split itself; 1 is used")
    return found
