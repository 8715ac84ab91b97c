"""Facts of the zoo's tasks on a CPU that can do all a CPU can, and of a machine and model that lack everything."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.utils.data import IterableDataset

from ..measure.checks.split import measure_split
from ..pruning import linear_features, obstacle
from ..task import Task
from ..techniques import Device, Facts
from ..techniques.allocator import installed_allocators
from ..techniques.attention import ways
from ..techniques.checkpointing import find_blocks
from ..techniques.frozen_weights import FrozenWeights
from ..techniques.optimizers.optimizer import supported_implementations
from ..techniques.optimizers.optimizer_state import OptimizerState
from ..techniques.optimizers.sparse_gradients import SparseGradients
from ..techniques.reversible import Reversible
from ..techniques.support.feed_forward import find_feed_forwards
from ..training.fingerprint import fingerprint
from ..units import MIB
from .zoo import BATCH_SIZE, once_each

BARE = Facts(
    fingerprint="sha256:" + 64 * "0",
    device=Device(type="cpu", name="bare CPU", memory_bytes=64 * MIB, bf16=False),
    torch_version="2.13.0",
    num_threads=2,
    host_memory_bytes=64 * MIB,
    num_parameters=1,
    num_trainable=1,
    num_blocks=0,
    block_name="",
    conv_dims=(),
    dataset_length=None,
    dataset_kind="iterable",
    dataset_bytes=None,
    dataset_deterministic=False,
    stackable=False,
    shapes_vary=True,
    shards_by_worker=False,
    loader_options={},
    loader_samples_per_s={},
    effective_batch=8,
    effective_batch_held=True,
    effective_batch_assumed=False,
    split_error=0.1,
    allow_split=False,
    optimizer="LBFGS",
    optimizer_implementations=(),
    allocators=(),
)
"""A machine without bfloat16 or allocators; a model without blocks or convolutions; a stream; no split permitted."""

_CONVOLUTIONS: dict[type[nn.Module], int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}


@once_each
def facts_of(task: Task) -> Facts:
    """What a zoo's task is. Splits are permitted; a loader worker is taken to gain where there is collation."""
    model, dataset = task.build_model(), task.build_dataset()
    optimizer, modules = task.make_optimizer(model), list(model.modules())
    blocks = find_blocks(model)
    stream = isinstance(dataset, IterableDataset)
    samples = list(itertools.islice(dataset if stream else map(dataset.__getitem__, range(BATCH_SIZE)), BATCH_SIZE))
    known = {
        "fingerprint": fingerprint(model, dataset, task.collate),
        "device": Device(type="cpu", name="CPU", memory_bytes=2**30, bf16=True),
        "host_memory_bytes": 2**30,
        "num_blocks": len(blocks),
        "block_name": type(blocks[0]).__name__,
        "conv_dims": tuple({_CONVOLUTIONS[type(module)] for module in modules if type(module) in _CONVOLUTIONS}),
        "pruning_obstacle": obstacle(model),
        "linear_features": linear_features(model),
        **FrozenWeights.facts_of(model, optimizer, "cpu"),
        "num_feed_forwards": len(find_feed_forwards(model)),
        **Reversible.facts_of(model, optimizer, "cpu"),
        "attention": ways(model),
        "variants": {name: sum(p.numel() for p in build().parameters()) for name, build in task.variants.items()},
        "dataset_length": None if stream else len(dataset),
        "dataset_kind": "iterable" if stream else "map",
        "dataset_bytes": None if stream else MIB,
        "dataset_deterministic": True,
        "stackable": task.collate is None,
        "loader_samples_per_s": {0: 100.0} if task.collate is None else {0: 100.0, 1: 200.0},
        "effective_batch": task.batch_size or 1,
        "split_error": measure_split(task, model, samples, torch.device("cpu")).error,
        "allow_split": True,
        "optimizer": type(optimizer).__name__,
        "optimizer_implementations": supported_implementations(optimizer),
        **OptimizerState.facts_of(model, optimizer, "cpu"),
        **SparseGradients.facts_of(model, optimizer, "cpu"),
        "allocators": installed_allocators(),
    }
    return BARE.model_copy(update=known)
