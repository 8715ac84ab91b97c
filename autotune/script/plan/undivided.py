"""Whether the losses that a script passes back are means that nothing has divided, as their graphs tell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

DIVIDE = "divide each loss by the backward passes to a step before it is passed back: `(loss / accumulate).backward()`"
_BY_FACTOR = {"DivBackward", "MulBackward"}
_AS_IT_IS = {"ToCopyBackward", "ViewBackward", "ReshapeAliasBackward", "CloneBackward", "SqueezeBackward"}
_MEAN = 1
"""Of a loss function's ``reduction``, as autograd keeps it."""
_Gradients = dict[int, tuple[int, int]]
"""By parameter, the gradient that it has, and its version."""


class Undivided:
    """Of the backward passes of one optimizer step."""

    def __init__(self) -> None:
        self._are_means: list[bool] = []
        self._left: _Gradients = {}
        """That the last pass made."""

    @contextmanager
    def passing_back(self, loss: Any, parameters: Callable[[], Iterable[torch.Tensor]]) -> Iterator[None]:
        """A loss is passed back within the block; its graph is whole before that alone."""
        self._are_means.append(isinstance(loss, torch.Tensor) and any(map(_is_mean, _terms(loss.grad_fn))))
        yield
        self._left = _gradients(parameters())

    def are_sure(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether each was a mean, and the script has left their gradients as they were made: divided or clipped none
        of them after it."""
        return all(self._are_means) and bool(self._left) and self._left == _gradients(parameters)


def _gradients(parameters: Iterable[torch.Tensor]) -> _Gradients:
    grads = ((id(one), one.grad) for one in parameters)
    return {name: (id(grad), grad._version) for name, grad in grads if grad is not None}


def _terms(node: Any) -> Iterator[Any]:
    """What a loss is the sum of, without what is scaled."""
    if node is None:
        return
    name, before = node.name().rstrip("0123456789"), [one for one, _ in node.next_functions if one is not None]
    if name == "AddBackward" or name in _AS_IT_IS or (name in _BY_FACTOR and _factor(node) == 1.0):
        for one in before:
            yield from _terms(one)
    elif name not in _BY_FACTOR:
        yield node


def _factor(node: Any) -> float | None:
    """That a loss is divided or multiplied by; None where it is another's result."""
    other = getattr(node, "_saved_other", None)
    if other is None or sum(one is not None for one, _ in node.next_functions) > 1:
        return None
    return float(other) if not isinstance(other, torch.Tensor) or other.numel() == 1 else None


def _is_mean(node: Any) -> bool:
    return node.name().startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == _MEAN
