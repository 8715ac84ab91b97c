"""Detects models and losses that ignore ``num_items_in_batch``, the items of the whole optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from ..randomness import undisturbed


def two_samples(trainer: Any, loader: Any) -> Callable[[nn.Module], Any] | None:
    """Forward and loss of the model that it is given, on two samples; None where those can be read only once."""
    if isinstance(loader.dataset, IterableDataset) or loader.collate_fn is None:
        return None
    return partial(_loss, trainer, loader.dataset, loader.collate_fn, None)


def ignores_count(trainer: Any, model: nn.Module, loader: Any) -> bool:
    """Whether the Trainer takes the loss for one that is divided by the items of the whole step, and it is not: then
    gradients over several micro-batches add up and are divided by nothing.

    A module whose ``forward`` has ``**kwargs`` is told ``num_items_in_batch``, and need not heed it.
    """
    takes = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if not takes or trainer.loss_is_scaled_for_ga is not None or two_samples(trainer, loader) is None:
        return False
    dataset, collate = loader.dataset, loader.collate_fn
    if trainer._get_num_items_in_batch([collate([dataset[0]])], trainer.args.device) is None:
        return trainer.compute_loss_func is not None
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        one, many = (float(_loss(trainer, dataset, collate, count, model)) for count in (1, 1000))
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    return abs(one - many) <= 1e-3 * abs(one)


def _loss(trainer: Any, dataset: Any, collate: Any, count: int | None, model: nn.Module) -> Any:
    with undisturbed():
        inputs = trainer._prepare_inputs(collate([dataset[number] for number in range(min(2, len(dataset)))]))
        items = None if count is None else torch.tensor(count, device=trainer.args.device)
        return trainer.compute_loss(model, inputs, num_items_in_batch=items)
