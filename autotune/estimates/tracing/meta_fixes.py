"""Corrections of torch's fake implementations where the real kernel's result has another layout, type or storage.

Found by comparing every operation of a real step with the same of a fake-tensor step, over the models of
``benchmarks/estimate.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_HALVES = (torch.bfloat16, torch.float16)
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def correction_of(func: Any, target: str) -> Callable[..., Any] | None:
    """The function that turns an operation's fake results into what the kernel returns; None where torch's are right.

    Args:
        func: an overload.
        target: the device that is planned for.
    """
    return (_ON_CPU.get(func) if target == "cpu" else None) or _ANYWHERE.get(func)


def _batch_norm(results: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The result is channels_last where the input is, else contiguous."""
    y = results[0]
    form = _LAST.get(x.dim(), torch.contiguous_format)
    is_last = form != torch.contiguous_format and x.is_contiguous(memory_format=form) and not x.is_contiguous()
    form = form if is_last else torch.contiguous_format
    if y is None or y.is_contiguous(memory_format=form):
        return results
    return (torch.empty(y.shape, dtype=y.dtype, device=y.device, memory_format=form), *results[1:])


def _batch_norm_backward(results: Any, grad: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The same for the input's gradient."""
    return _batch_norm(results, x)


def _norm(results: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Mean and deviation of half-precision inputs are of the weights' type."""
    y, *statistics = results
    weight = next((one for one in args if isinstance(one, Tensor)), x)
    if x.dtype not in _HALVES or statistics[0].dtype == weight.dtype:
        return results
    return (y, *(torch.empty(one.shape, dtype=weight.dtype, device=one.device) for one in statistics))


def _group_norm_backward(results: Any, grad: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The input's gradient is of the input's type, whatever the weights'."""
    grad_x, *others = results
    if grad_x is None or grad_x.dtype == x.dtype:
        return results
    return (torch.empty_strided(grad_x.shape, grad_x.stride(), dtype=x.dtype, device=grad_x.device), *others)


def _loss(result: Tensor, x: Tensor, y: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A mean or sum keeps the storage of all elements' losses."""
    if result.dim():
        return result
    shape = torch.broadcast_shapes(x.shape, y.shape)  # type: ignore[no-untyped-call]
    return torch.empty(shape, dtype=result.dtype, device=result.device).as_strided((), ())


def _loss_backward(result: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The gradient is contiguous, whatever the layout of the input."""
    return result if result.is_contiguous() else torch.empty(result.shape, dtype=result.dtype, device=result.device)


_ON_CPU: dict[Any, Callable[..., Any]] = {
    _aten.native_batch_norm.default: _batch_norm,
    _aten.native_batch_norm_backward.default: _batch_norm_backward,
    _aten.native_layer_norm.default: _norm,
    _aten.native_group_norm.default: _norm,
}
_ANYWHERE: dict[Any, Callable[..., Any]] = {
    _aten.native_group_norm_backward.default: _group_norm_backward,
    _aten.mse_loss.default: _loss,
    _aten.smooth_l1_loss.default: _loss,
    _aten.mse_loss_backward.default: _loss_backward,
    _aten.smooth_l1_loss_backward.default: _loss_backward,
}
