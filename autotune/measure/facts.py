"""The facts that are read off a job's pieces, whoever found them: a task's, or a script's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.data import IterableDataset

from ..nested import bytes_in
from ..techniques import TECHNIQUES, Facts, lost_techniques, not_in_inference
from ..techniques.batch import Batch
from ..techniques.checkpointing import find_blocks
from ..techniques.support.bits.float8_linear import layers_for_float8
from ..techniques.support.facts import num_processors
from .dataset import DatasetFacts
from .device import available_host_bytes, inspect_device
from .measurement import InspectOptions

_OF_STREAM = "workers that stay go on in a stream, where those of a new epoch begin it"


def build_facts(
    model: nn.Module,
    dataset: Any,
    data: DatasetFacts,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    options: InspectOptions,
    device: Literal["cpu", "cuda"],
    blocks: Sequence[str] = (),
    **others: Any,
) -> Facts:
    """Facts of a job.

    Args:
        model: as built.
        dataset: what its loader reads.
        data: what was found in it.
        optimizer: of the model.
        batch: of an optimizer step, as the job stands.
        options: what the user said.
        device: torch's device type.
        blocks: paths of the model's blocks, where they are named.
        others: the facts that nobody can read off these, and any in the place of what is read.
    """
    read: dict[str, Any] = {
        "device": inspect_device(device),
        "torch_version": torch.__version__,
        "num_threads": torch.get_num_threads(),
        "tries_kernels": torch.backends.cudnn.benchmark,
        "host_memory_bytes": available_host_bytes(),
        **_of_model(model, blocks),
        "dataset_length": data.length,
        "dataset_kind": "iterable" if isinstance(dataset, IterableDataset) else "map",
        "dataset_bytes": data.num_bytes,
        "dataset_deterministic": data.deterministic,
        "epochs_differ": _OF_STREAM if isinstance(dataset, IterableDataset) else None,
        "stackable": data.stackable,
        "shapes_vary": data.shapes_vary,
        "samples_on_device": data.on_device,
        "effective_batch": batch.num_samples,
        "micro_batch": batch.micro if batch.accumulate > 1 else None,
        "allow_split": options.allow_split,
        "allow_lossy": options.allow_lossy,
        "left_out": {**lost_techniques(), **(not_in_inference() if options.inference else {})},
        "num_devices": torch.cuda.device_count() if device == "cuda" else num_processors(),
    }
    for technique in TECHNIQUES.values():
        read |= technique.facts_of(model, optimizer, device)
    return Facts(**(read | others))


def _of_model(model: nn.Module, paths: Sequence[str]) -> dict[str, Any]:
    blocks = find_blocks(model, paths)
    parameters = list(model.parameters())
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    return {
        "num_parameters": sum(p.numel() for p in parameters),
        "num_trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "num_blocks": len(blocks),
        "block_bytes": max((bytes_in([*block.parameters()]) for block in blocks), default=0),
        "outside_bytes": bytes_in([p for p in parameters if id(p) not in in_blocks]),
        "buffer_bytes": bytes_in([*model.buffers()]),
        "float8_numbers": sum(linear.weight.numel() for linear in {*layers_for_float8(blocks)}),
        "block_name": " or ".join(dict.fromkeys(type(block).__name__ for block in blocks)),
        "conv_dims": tuple(sorted({m.weight.ndim - 2 for m in model.modules() if isinstance(m, _ConvNd)})),
    }
