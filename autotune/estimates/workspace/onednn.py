"""Workspace of oneDNN's convolutions on a CPU: operands reordered into its own layout, and buffers of each thread.

Measured with torch.profiler's memory events on torch 2.13 (x86, AVX-512), over kernels, strides, channels, groups,
layouts and types. "Blocked" is oneDNN's layout (nChw16c): channels in blocks of 16. "In planes" is torch's contiguous
layout (NCHW).
"""

from __future__ import annotations

import math
from typing import Any

from .kernel import HALVES, Like, num_threads
from .slow_convolution import Convolution

_LANES = 16
"""Channels in a block of oneDNN's layout; channels are rounded up to a multiple."""
_FIRST = 3
"""Most input channels (an image's) that the weight gradient in fp32 reads without reordering."""
_REDUCES = 6.0
"""In fp32, threads share the batch from this ratio of the input's elements to the weight's on."""
_WIDEST = 3
"""Widest depthwise kernel whose weight gradient oneDNN computes from channels_last images."""
_LARGEST = 14
"""Widest kernel whose weight gradient is computed like that of small kernels."""
_PARTS = 4.25
"""Per-thread fp32 gradient buffer for kernels wider than ``_LARGEST``, in sizes of the weight."""


def onednn_convolution(
    y: Like, x: Like, weight: Like, bias: Any, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, output_padding: list[int], groups: int,
) -> int:  # fmt: skip
    """Workspace of forward, bytes. Input and weight are reordered into the blocked layout; the result is computed
    there, then copied."""
    is_last = _is_channels_last(x, weight)
    convolution = Convolution(x, weight, stride, padding, dilation, transposed, output_padding, groups)
    if convolution.is_slow(num_threads()):
        return copy_bytes(x, is_last) + convolution.forward_bytes(y)
    blocked_weight = _blocked_weight_bytes(weight, x.dtype.itemsize)
    if is_last:
        return copy_bytes(x, True) + blocked_weight
    if _is_apart(weight, transposed, groups):
        return copy_bytes(x, False) + y.num_bytes
    if transposed and max(stride) > 1:  # computed plain, and copied once more
        computing, result = _blocked_bytes(x) + blocked_weight, 2 * y.num_bytes
    else:
        result = _blocked_bytes(y)
        computing = (_blocked_bytes(x) if transposed else _source_bytes(x)) + blocked_weight + result - y.num_bytes
    if x.dtype in HALVES and _is_pointwise(weight) and groups == 1:  # each thread adds up an image's result
        computing += min(num_threads(), y.size[0]) * (4 // y.dtype.itemsize) * _blocked_bytes(y) // max(1, y.size[0])
    return copy_bytes(x, False) + max(computing, result)


def onednn_convolution_backward(
    results: Any, grad: Like, x: Like, weight: Like, bias_sizes: Any, stride: list[int], padding: list[int],
    dilation: list[int], transposed: bool, output_padding: list[int], groups: int, wanted: list[bool],
) -> int:  # fmt: skip
    """Workspace of backward, bytes: the larger of the input gradient's and the weight gradient's. The input's comes
    first; each is computed in the blocked layout, then copied."""
    is_last = _is_channels_last(x, weight)
    convolution = Convolution(x, weight, stride, padding, dilation, transposed, output_padding, groups)
    if convolution.is_slow(num_threads()):
        return copy_bytes(grad, is_last) + copy_bytes(x, is_last) + convolution.backward_bytes(grad)
    copied = copy_bytes(grad, is_last) + copy_bytes(x, is_last)
    blocked_weight = _blocked_weight_bytes(weight, x.dtype.itemsize)
    grad_x, grad_weight = (one.num_bytes if wants else 0 for one, wants in zip((x, weight), wanted, strict=False))
    is_depthwise = groups > 1 and weight.size[1] == 1 and not transposed
    is_wide = is_depthwise and weight.size[-1] > _WIDEST
    if _is_apart(weight, transposed, groups) and not is_last:
        result = x.num_bytes * (2 if max(stride) > 1 else 1) if wanted[0] else 0
        is_blocked = wanted[1] and x.dtype not in HALVES and weight.size[1] % (_LANES // 2) == 0
        return copied + max(result, x.num_bytes + grad.num_bytes if is_blocked else 0)
    most = 0
    if wanted[0] and is_last:
        most = grad_x + blocked_weight
    elif wanted[0]:
        blocked_x = _blocked_bytes(x)
        blocked_grad = _source_bytes(grad) if transposed else _blocked_bytes(grad)
        is_copied = groups == 1 or weight.size[1] > _LANES or (is_depthwise and x.dtype in HALVES)
        is_strided = max(stride) > 1 and not transposed and is_copied  # computed plain, and copied once more
        if is_strided and groups == 1:
            blocked_x = x.num_bytes
        most = max(blocked_grad + blocked_weight + blocked_x, blocked_x + grad_x * (2 if is_strided else 1))
    if wanted[1] and is_wide and not is_last:
        most = max(most, grad_x + grad_weight + _columns_bytes(grad, weight))
    elif wanted[1]:
        computing = _weight_gradient_bytes(grad, x, weight, stride, transposed)
        if is_wide:
            computing += _wide_depthwise_bytes(grad, x, weight, groups)
        most = max(most, grad_x + computing, grad_x + (3 * grad_weight if is_last else blocked_weight + grad_weight))
    return copied + max(0, most - grad_x - grad_weight)


def _is_apart(weight: Like, transposed: bool, groups: int) -> bool:
    """Whether groups hold no whole blocks of channels: these are neither rounded up nor reordered."""
    return groups > 1 and weight.size[1] > 1 and weight.size[1] % _LANES > 0 and not transposed


def _weight_gradient_bytes(grad: Like, x: Like, weight: Like, stride: list[int], transposed: bool) -> int:
    source, target = (grad, x) if transposed else (x, grad)
    if weight.size[-1] > _LARGEST and (x.dtype not in HALVES or source.size[1] >= _LANES):
        return round(_PARTS * num_threads() * 4 * weight.num_elements) + weight.num_bytes
    images = 0 if _is_channels_last(x, weight) else _source_bytes(source, to_weight=True) + _blocked_bytes(target)
    weights = _blocked_weight_bytes(weight, x.dtype.itemsize)
    return images + weights + _reduction_bytes(source, target, x, weight, stride)


def _wide_depthwise_bytes(grad: Like, x: Like, weight: Like, groups: int) -> int:
    """Workspace of the weight gradient of a depthwise kernel wider than 3 over channels_last images, for which oneDNN
    has no kernel: a block of 16 by 16 channels for each group. In half precision there is an fp32 copy too, and an
    image each of input and gradient with 16 channels for each group."""
    blocked = groups * _rounded(weight.size[0] // groups) * _LANES * math.prod(weight.size[2:])
    if weight.dtype not in HALVES:
        return blocked * weight.dtype.itemsize
    images = (x.num_bytes + grad.num_bytes) // max(1, x.size[0])
    return blocked * (weight.dtype.itemsize + 4) + _LANES * images


def _columns_bytes(grad: Like, weight: Like) -> int:
    """The same over images in planes: torch unfolds one group of one image into columns, and multiplies."""
    return math.prod(weight.size[1:]) * math.prod(grad.size[2:]) * weight.dtype.itemsize


def _reduction_bytes(source: Like, target: Like, x: Like, weight: Like, stride: list[int]) -> int:
    """Buffers of threads that share the batch: an fp32 weight gradient each. In half precision there is one even for a
    single thread, and a transposed image of the input and of the gradient."""
    per_thread = _blocked_weight_bytes(weight, 4)
    if x.dtype not in HALVES:
        return (num_threads() - 1) * per_thread if x.num_elements > _REDUCES * weight.num_elements else 0
    num_sharing = _num_sharing(source, target, weight, max(stride) > 1)
    if _is_pointwise(weight) and not _is_channels_last(x, weight):  # a matrix product, which reads them as they lie
        return num_sharing * per_thread
    images = _source_bytes(source, to_weight=True) or source.num_bytes, _blocked_bytes(target)
    return num_sharing * (per_thread + sum(images) // max(1, x.size[0]))


def _num_sharing(source: Like, target: Like, weight: Like, is_strided: bool) -> int:
    """How many threads share the batch; the others share the channels.

    Source: oneDNN, src/cpu/x64/jit_avx512_core_bf16_conv_kernel.cpp, balance: the least memory that a thread reads.
    With a stride, where images outweigh the weights, it was always one.
    """
    threads, batch = num_threads(), source.size[0]
    from_, to = (-(-one.size[1] // _LANES) for one in (source, target))
    kernel = math.prod(weight.size[2:])
    elements = sum(_blocked_bytes(one) // one.dtype.itemsize for one in (source, target))
    compensation = elements / _blocked_weight_bytes(weight, 4)
    if is_strided and compensation >= 1.0:
        return 1
    weigh_source = max(from_ / to, 1.0) * (4.0 if compensation < 1.0 else 1.0)

    def cost(sharing: int, by_to: int, by_from: int) -> float:
        images, ours, theirs = -(-batch // sharing), -(-from_ // by_from), -(-to // by_to)
        read = weigh_source * images * ours * min(_LANES, source.size[1]) * math.prod(source.size[2:])
        written = max(to / from_, 1.0) * images * theirs * _LANES * math.prod(target.size[2:])
        return read + written + max(compensation, 1.0) * ours * theirs * kernel * _LANES**2

    splits = [
        (sharing, by_to, min(threads // sharing // by_to, from_))
        for sharing in range(1, min(threads, batch) + 1)
        for by_to in range(1, min(threads // sharing, to) + 1)
    ]
    return min(splits, key=lambda split: cost(*split))[0]


def _is_pointwise(weight: Like) -> bool:
    return math.prod(weight.size[2:]) == 1


def _is_channels_last(x: Like, weight: Like) -> bool:
    return x.is_channels_last() or weight.is_channels_last()


def copy_bytes(x: Like, is_last: bool) -> int:
    """Bytes of a copy of an input whose layout is not the one that the kernel reads."""
    return 0 if x.is_dense(channels_last=is_last) else x.num_bytes


def _source_bytes(x: Like, to_weight: bool = False) -> int:
    """Bytes of a reordered input. Few channels are read without reordering; in fp32 a weight gradient reads still fewer
    so, and with some more it takes blocks of half the channels."""
    channels = x.size[1]
    if x.dtype in HALVES or not to_weight:
        return 0 if channels < _LANES else _blocked_bytes(x)
    if channels <= _FIRST:
        return 0
    return x.num_bytes // channels * _LANES // 2 if channels <= _LANES // 2 else _blocked_bytes(x)


def _blocked_bytes(x: Like) -> int:
    """Bytes of a tensor (batch, channels, …) in the blocked layout."""
    return x.num_bytes // max(1, x.size[1]) * _rounded(x.size[1])


def _blocked_weight_bytes(weight: Like, itemsize: int) -> int:
    first, second = weight.size[:2]
    blocked = weight.num_elements // max(1, first * second) * _rounded(first)
    few = second + second % 2 if itemsize == 2 else second
    return blocked * (few if second < _LANES else _rounded(second)) * itemsize


def _rounded(channels: int) -> int:
    return -(-channels // _LANES) * _LANES
