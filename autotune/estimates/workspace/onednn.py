"""Images that oneDNN reorders for convolutions on a CPU, and copies back.

"Blocked" is oneDNN's layout (nChw16c): channels in blocks of 16. "In planes" is torch's contiguous layout (NCHW). In
channels_last nothing is reordered, but wide depthwise kernels have blocks of their own. Measured with torch.profiler's
memory events on torch 2.13 (x86, AVX-512). Left out are reordered weights, threads' parts of the weights' gradients,
and columns of torch's own kernels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .layouts import is_channels_last, is_dense

_LANES = 16
"""Channels in a block; channels are rounded up to a multiple, and fewer of an input are read as they lie."""
_WIDEST = 3
"""Widest depthwise kernel whose weight gradient oneDNN computes from channels_last images as they lie."""
_HALVES = (torch.bfloat16, torch.float16)


def onednn_convolution(
    y: Tensor, x: Tensor, weight: Tensor, bias: Any, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, output_padding: list[int], groups: int,
) -> int:  # fmt: skip
    """Bytes of the input's blocks, beside which the result is computed in blocks and then copied."""
    is_last = is_channels_last(x) or is_channels_last(weight)
    if is_last:
        return _copy_bytes(x, True)
    if _is_apart(weight, transposed, groups):
        return _copy_bytes(x) + y.nbytes
    return _copy_bytes(x) + max(_source_bytes(x) + _blocked_bytes(y) - y.nbytes, _blocked_bytes(y))


def onednn_convolution_backward(
    results: Any, grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, stride: list[int], padding: list[int],
    dilation: list[int], transposed: bool, output_padding: list[int], groups: int, wanted: list[bool],
) -> int:  # fmt: skip
    """Bytes of blocks of the gradient and the input, both of which the weight's gradient reads; or, if that is more, of
    the input's gradient in blocks and, where there is a stride, copied once more."""
    is_last = is_channels_last(x) or is_channels_last(weight)
    copied = _copy_bytes(grad, is_last) + _copy_bytes(x, is_last)
    if is_last:
        return copied + (_wide_depthwise_bytes(grad, x, weight, groups) if wanted[1] and not transposed else 0)
    if _is_apart(weight, transposed, groups):
        return copied + x.nbytes
    most = 0
    if wanted[1]:
        source, target = (grad, x) if transposed else (x, grad)
        most = _source_bytes(source) + _blocked_bytes(target)
    elif wanted[0]:
        most = max(_blocked_bytes(grad) + _blocked_bytes(x) - x.nbytes, _blocked_bytes(x))
    if wanted[0] and max(stride) > 1 and not transposed and (groups == 1 or x.dtype in _HALVES):
        most = max(most, 2 * x.nbytes)
    return copied + most


def _wide_depthwise_bytes(grad: Tensor, x: Tensor, weight: Tensor, groups: int) -> int:
    """Bytes of the weight gradient of a depthwise kernel wider than 3 over channels_last images, for which oneDNN has
    no kernel: a block of 16 by 16 channels for each group. In half precision there is an fp32 copy too, and an image
    each of input and gradient with 16 channels for each group."""
    if groups == 1 or weight.size(1) > 1 or weight.size(-1) <= _WIDEST:
        return 0
    blocks = groups * _rounded(weight.size(0) // groups) * _LANES * math.prod(weight.shape[2:])
    if weight.dtype not in _HALVES:
        return blocks * weight.element_size()
    return blocks * (weight.element_size() + 4) + _LANES * (x.nbytes + grad.nbytes) // max(1, x.size(0))


def _is_apart(weight: Tensor, transposed: bool, groups: int) -> bool:
    """Whether groups hold no whole blocks of channels: these are neither rounded up nor reordered."""
    return groups > 1 and weight.size(1) > 1 and weight.size(1) % _LANES > 0 and not transposed


def _copy_bytes(x: Tensor, is_last: bool = False) -> int:
    """Bytes of a copy of an input whose layout is not the one that the kernel reads."""
    return 0 if is_dense(x, is_last) else x.nbytes


def _source_bytes(x: Tensor) -> int:
    """Bytes of a reordered input; few channels are read without reordering."""
    return 0 if x.size(1) < _LANES else _blocked_bytes(x)


def _blocked_bytes(x: Tensor) -> int:
    """Bytes of a tensor (batch, channels, …) in the blocked layout."""
    return x.nbytes // max(1, x.size(1)) * _rounded(x.size(1))


def _rounded(channels: int) -> int:
    return -(-channels // _LANES) * _LANES
