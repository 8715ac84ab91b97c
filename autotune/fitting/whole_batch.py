"""A user's model and one batch of its loop as a task, whose every batch is that one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import Caught, TaskError
from ..nested import rows_of, samples_in, to_device
from ..task import Task
from ..techniques.batch import Batch
from .stand_in import StandIns

Loss = Callable[[nn.Module, Any], Any]

WHOLE = 2
"""Samples that the user's batch is said to have: it is traced as it is, and not made of samples."""
_FEWEST = 6
"""Samples from which on real steps are made with a few of them, and extended to all."""


@dataclass(frozen=True)
class Loop:
    """What a user's loop does, as far as its memory depends on it."""

    loss: Loss
    """(model, batch) -> scalar."""
    accumulate: int = 1
    """Batches whose gradients are added up before an optimizer step."""
    max_grad_norm: float | None = None
    """What the norm of all gradients is clipped at; None where it is not."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] | None = None
    """What forward and loss compute in; None is the model as it stands."""
    blocks: tuple[str, ...] = ()
    """Module paths of the model's blocks; none are found."""
    takes_fewer: bool = True
    """Whether the loss is one of fewer samples, too; else sizes of the batch are a part of it."""

    @property
    def batch(self) -> Batch:
        """Of an optimizer step."""
        return Batch(micro=WHOLE, accumulate=self.accumulate)

    @property
    def sizes(self) -> dict[str, Any]:
        """The batch, as :class:`autotune.estimates.EstimateOptions` has it."""
        return {"reference_batch": self.batch.num_samples, "reference_micro": self.batch.micro, "is_held": True}

    def task(self, stand_ins: StandIns, build_model: Callable[[], nn.Module], data: Any, micro: int) -> Task:
        """Of copies of the user's model.

        Args:
            stand_ins: that build the optimizer.
            build_model: one of theirs.
            data: the batch, or numbers of its samples with what puts some together.
            micro: samples of it in one forward pass.
        """
        dataset, collate = data
        return Task(
            build_model=build_model,
            build_dataset=lambda: dataset,
            compute_loss=self.loss,
            build_optimizer=stand_ins.build_optimizer,
            collate=collate,
            batch_size=micro * self.accumulate,
            micro_batch_size=micro,
            max_grad_norm=self.max_grad_norm,
            precision=self.precision,
            blocks=self.blocks,
        )


def traced_task(stand_ins: StandIns, batch: Any, loop: Loop) -> Task:
    """Of steps over copies without values."""
    return loop.task(stand_ins, stand_ins.build_model, _whole(_on_cpu(batch)), WHOLE)


def probed_task(stand_ins: StandIns, batch: Any, loop: Loop) -> Task:
    """Of real steps over copies: with a few of the batch's samples where it has more, and the loss takes them."""
    here = _on_cpu(batch)
    num_samples = samples_in(here)
    if num_samples < _FEWEST or not loop.takes_fewer:
        return loop.task(stand_ins, stand_ins.build_real_model, _whole(here), WHOLE)

    def rows(samples: list[int]) -> Any:
        """The batch's first samples, as many as are asked for."""
        return rows_of(here, num_samples, slice(0, len(samples)))

    return loop.task(stand_ins, stand_ins.build_real_model, (range(num_samples), rows), num_samples)


def _on_cpu(batch: Any) -> Any:
    with Caught() as raised:
        if isinstance(batch, Iterator):
            raise TypeError("an iterator gives its tensors once")
        return to_device(batch, torch.device("cpu"))
    error = raised.take()
    raise TaskError(
        f"fit: batch: it cannot be copied to the CPU: {type(error).__name__}: {error}. Give tensors with values, "
        "alone or in a dict, a tuple or a list, as the loop gives them to the model."
    )


def _whole(batch: Any) -> tuple[Any, Callable[[list[Any]], Any]]:
    return [batch] * WHOLE, lambda samples: samples[0]


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
    if isinstance(found, Mapping):  # transformers' outputs are, too
        found = found.get("loss")
    elif not isinstance(found, Tensor):
        found = getattr(found, "loss", found)
    found = found[0] if isinstance(found, (tuple, list)) and found else found
    if not isinstance(found, Tensor) or found.numel() != 1:
        shape = f" of shape {tuple(found.shape)}" if isinstance(found, Tensor) else ""
        raise TaskError(
            f"fit: the model returned {type(found).__name__}{shape}, and no loss. Give loss=, a function of the model "
            "and the batch: loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])."
        )
    return found
