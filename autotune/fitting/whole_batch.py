"""A user's model and one batch of its loop as a task, whose every batch is that one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import TaskError
from ..nested import rows_of, samples_in, to_device
from ..task import Task
from ..techniques.batch import Batch
from .stand_in import StandIns

Loss = Callable[[nn.Module, Any], Any]

WHOLE = Batch(micro=2)
"""The user's batch, however many samples it has: it is traced as it is, and not made of samples."""
_FEWEST = 6
"""Samples from which on real steps are made with a few of them, and extended to all."""


def traced_task(stand_ins: StandIns, batch: Any, loss: Loss, blocks: Sequence[str]) -> Task:
    """Of steps over copies without values."""
    here = to_device(batch, torch.device("cpu"))
    return _task(stand_ins.build_model, stand_ins, [here, here], lambda samples: samples[0], loss, blocks, WHOLE.micro)


def probed_task(stand_ins: StandIns, batch: Any, loss: Loss, blocks: Sequence[str]) -> Task:
    """Of real steps over copies: with a few of the batch's samples where it has more."""
    here = to_device(batch, torch.device("cpu"))
    num_samples = samples_in(here)
    if num_samples < _FEWEST:
        dataset = [here, here]
        return _task(
            stand_ins.build_real_model, stand_ins, dataset, lambda samples: samples[0], loss, blocks, WHOLE.micro
        )

    def rows(samples: list[int]) -> Any:
        """The batch's first samples, as many as are asked for."""
        return rows_of(here, num_samples, slice(0, len(samples)))

    return _task(stand_ins.build_real_model, stand_ins, range(num_samples), rows, loss, blocks, num_samples)


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that a model returns of a batch: by itself, as ``.loss`` or ``["loss"]``, or as the first of several.

    Raises:
        TaskError: it returns none.
    """
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        found = model(**batch)
    elif isinstance(batch, (tuple, list)):
        found = model(*batch)
    else:
        found = model(batch)
    if isinstance(found, Mapping) and "loss" in found:
        found = found["loss"]
    elif not isinstance(found, Tensor):
        found = getattr(found, "loss", None) if hasattr(found, "loss") else found
    found = found[0] if isinstance(found, (tuple, list)) and found else found
    if not isinstance(found, Tensor) or found.numel() != 1:
        shape = f" of shape {tuple(found.shape)}" if isinstance(found, Tensor) else ""
        raise TaskError(
            f"fit: the model returned {type(found).__name__}{shape}, and no loss. Give loss=, a function of the model "
            "and the batch: loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])."
        )
    return found


def _task(
    build_model: Callable[[], nn.Module],
    stand_ins: StandIns,
    dataset: Any,
    collate: Callable[[list[Any]], Any],
    loss: Loss,
    blocks: Sequence[str],
    batch_size: int,
) -> Task:
    return Task(
        build_model=build_model,
        build_dataset=lambda: dataset,
        compute_loss=loss,
        build_optimizer=stand_ins.build_optimizer,
        collate=collate,
        batch_size=batch_size,
        blocks=tuple(blocks),
    )
