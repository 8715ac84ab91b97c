"""Runs a model on two samples of its dataset: techniques look there at what its layers do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset

from ..nested import to_device
from ..randomness import undisturbed
from ..techniques.support.base import Run


def on_two_samples(dataset: Any, collate: Any, loss: Callable[[nn.Module, Any], Any]) -> Run | None:
    """What runs the model that it is given, forward and loss, and leaves everything random as it was.

    Args:
        dataset: of samples by number.
        collate: makes a batch of them; None is not known.
        loss: of a model and a batch that is where the model is.

    Returns:
        None where samples can be read only once, or there are none, or nobody says how they are collated.
    """
    is_empty = hasattr(dataset, "__len__") and len(dataset) == 0
    if isinstance(dataset, IterableDataset) or is_empty or collate is None:
        return None

    def run(model: nn.Module) -> Any:
        with undisturbed():
            batch = collate([dataset[number] for number in range(min(2, len(dataset)))])
            return loss(model, to_device(batch, next(model.parameters()).device))

    return run
