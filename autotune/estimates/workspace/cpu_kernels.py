"""Workspace that kernels allocate while they run, and free again: a dispatch mode does not see it.

Each entry of the CPU's table was measured with torch.profiler's memory events on torch 2.13 (x86, AVX-512, oneDNN).
Left out is what grows with neither batch nor weights: per-thread buffers in attention and the like, below 1 MiB each.
"In planes" is torch's contiguous layout (NCHW).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..tracing.fake_ops import Target
from .cudnn import cudnn_convolution, cudnn_convolution_backward
from .kernel import HALVES, Kernel, Like
from .onednn import copy_bytes, onednn_convolution, onednn_convolution_backward

_aten = torch.ops.aten
_MOST_SIDES = 128
"""Height plus width up to which images in planes are upsampled in channels_last."""
_PACKED_BYTES = 2**18
"""Buffer into which a half-precision matrix product packs its operands."""
_MOST_SUMS_BYTES = 2**21
"""Most fp32 sums that it holds at once."""


def kernel_of(target: Target, func: Any, args: Any, kwargs: Any, results: Any) -> Kernel | None:
    """An operation with its workspace; None for one that is not in the target's table.

    Args:
        target: the device that is planned for.
        func: an overload, as a dispatch mode sees it.
        args: of fake or real tensors.
        kwargs: the same.
        results: what it returned.
    """
    scratch = _TABLES[target].get(func.overloadpacket)
    return None if scratch is None else Kernel.of(scratch, results, args, kwargs)


def scratch_named(name: str) -> Callable[..., int]:
    """What is in a table under a function's name.

    Raises:
        KeyError: nothing is.
    """
    return {scratch.__name__: scratch for table in _TABLES.values() for scratch in table.values()}[name]


def _pool_backward(result: Like, grad: Like, x: Like, *rest: Any, **options: Any) -> int:
    """Computed in the gradient's layout: where the input's differs, the result is copied, and the indices are."""
    copied = [x, *(one for one in rest if isinstance(one, Like))]
    return 0 if grad.is_channels_last() == x.is_channels_last() else sum(one.num_bytes for one in copied)


def _upsample(y: Like, x: Like, *args: Any, **kwargs: Any) -> int:
    """Computed in channels_last where that is quicker: small images in planes are copied, and so is the result.

    Source: aten/src/ATen/native/cpu/UpSampleKernel.cpp, _use_vectorized_kernel_cond_2d.
    """
    return x.num_bytes + y.num_bytes if not x.is_channels_last() and sum(y.size[2:]) <= _MOST_SIDES else 0


def _upsample_backward(result: Like, grad: Like, *args: Any, **kwargs: Any) -> int:
    return 0 if grad.is_channels_last() else copy_bytes(grad, False)


def _batch_norm_backward(results: Any, grad: Like, x: Like, *rest: Any, **options: Any) -> int:
    """A buffer as large as the input's gradient."""
    wanted = rest[-1] if rest else options["output_mask"]
    return x.num_bytes if wanted[0] else 0


def _pointwise(result: Like, *args: Any, **kwargs: Any) -> int:
    """Operands of another type than the computation's are cast whole."""
    parts = [one for one in (*args, *kwargs.values()) if isinstance(one, Like) and one.size]
    if not parts:
        return 0
    dtype = parts[0].dtype
    for one in parts[1:]:
        dtype = torch.promote_types(dtype, one.dtype)
    return sum(one.num_elements * dtype.itemsize for one in parts if one.dtype not in (dtype, torch.bool))


def _reduced(result: Like, x: Like, *args: Any, **kwargs: Any) -> int:
    """A half-precision input is cast whole before it is summed."""
    return x.num_elements * 4 if x.dtype in HALVES else 0


def _loss(result: Like, x: Like, *args: Any, num_copies: int = 1, **kwargs: Any) -> int:
    """Each element's loss, before the mean; half-precision inputs are cast whole."""
    if result.size:
        return 0
    return num_copies * x.num_bytes + (4 * x.num_elements if x.dtype in HALVES else 0)


def _loss_of_logits(result: Like, x: Like, *args: Any, **kwargs: Any) -> int:
    """The same with two such tensors."""
    return _loss(result, x, *args, num_copies=2, **kwargs)


def _softmax(result: Like, x: Like, *args: Any, **kwargs: Any) -> int:
    """A contiguous copy of an input that is not contiguous."""
    return copy_bytes(x, False)


def _softmax_backward(result: Like, grad: Like, y: Like, *args: Any, **kwargs: Any) -> int:
    """The same of both inputs."""
    return copy_bytes(grad, False) + copy_bytes(y, False)


def _dropout(results: Any, x: Like, *args: Any, **kwargs: Any) -> int:
    """The mask, of the input's own type."""
    return x.num_bytes


def _product(result: Like, a: Like, b: Like, *args: Any, **kwargs: Any) -> int:
    """Packed operands; and, where a weight gradient is summed over the batch, the fp32 sums."""
    if a.dtype not in HALVES:
        return 0
    sums = 4 * a.size[0] * b.size[-1] if a.stride[-2] == 1 and a.size[0] > 1 else 0
    return min(_PACKED_BYTES, a.num_bytes + b.num_bytes) + min(sums, _MOST_SUMS_BYTES)


def _sum_and_product(result: Like, bias: Like, a: Like, b: Like, *args: Any, **kwargs: Any) -> int:
    return _product(result, a, b)


def _recurrent(results: Any, x: Like, *rest: Any) -> int:
    """The weights in blocks; in fp32 also the input of the gates at each step."""
    weights: tuple[Like, ...] = rest[:4]
    steps = 0 if x.dtype in HALVES else 4 * math.prod(x.size[:2]) * weights[1].size[0]
    return sum(one.num_bytes for one in weights) + steps


def _recurrent_backward(results: Any, x: Like, *rest: Any) -> int:
    """The weights and their gradients in blocks, the latter in fp32; also the gates' gradients of each step, or in half
    precision those of the states."""
    weights: tuple[Like, ...] = rest[:4]
    is_half = x.dtype in HALVES
    steps = 4 * math.prod(x.size[:2]) * weights[1].size[1 if is_half else 0]
    return (3 if is_half else 2) * sum(one.num_bytes for one in weights) + steps


_ON_CPU: dict[Any, Callable[..., int]] = {
    _aten.convolution: onednn_convolution,
    _aten.convolution_backward: onednn_convolution_backward,
    _aten.native_batch_norm_backward: _batch_norm_backward,
    _aten.mkldnn_rnn_layer: _recurrent,
    _aten.mkldnn_rnn_layer_backward: _recurrent_backward,
    _aten.native_dropout: _dropout,
    _aten.max_pool2d_with_indices_backward: _pool_backward,
    _aten.avg_pool2d_backward: _pool_backward,
    _aten._adaptive_avg_pool2d_backward: _pool_backward,
    _aten.upsample_nearest2d: _upsample,
    _aten.upsample_bilinear2d: _upsample,
    _aten.upsample_nearest2d_backward: _upsample_backward,
    _aten.upsample_bilinear2d_backward: _upsample_backward,
    _aten._log_softmax: _softmax,
    _aten._softmax: _softmax,
    _aten._log_softmax_backward_data: _softmax_backward,
    _aten._softmax_backward_data: _softmax_backward,
    _aten.mse_loss: _loss,
    _aten.smooth_l1_loss: _loss,
    _aten.huber_loss: _loss,
    _aten.binary_cross_entropy_with_logits: _loss_of_logits,
    _aten.mean: _reduced,
    _aten.mm: _product,
    _aten.addmm: _sum_and_product,
    **dict.fromkeys((_aten.add, _aten.add_, _aten.sub, _aten.mul, _aten.mul_, _aten.div, _aten.where), _pointwise),
}
_ON_CUDA: dict[Any, Callable[..., int]] = {
    _aten.convolution: cudnn_convolution,
    _aten.convolution_backward: cudnn_convolution_backward,
}
_TABLES: dict[Target, dict[Any, Callable[..., int]]] = {"cpu": _ON_CPU, "cuda": _ON_CUDA}
