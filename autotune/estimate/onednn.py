"""What oneDNN's convolutions take on a CPU beside their results: operands in its own layout, and buffers of threads.

Measured with torch.profiler's memory events on torch 2.13 (x86, AVX-512), over kernels, strides, channels, groups,
layouts and precisions.
"""

from __future__ import annotations

import math
from typing import Any

from .kernels import HALVES, Like
from .slow_convolution import Convolution
from .threads import num_threads

__all__ = ["copy_bytes", "onednn_convolution", "onednn_convolution_backward"]

_LANES = 16
"""Channels of a block of oneDNN's layout; channels are rounded up to it."""
_FIRST = 3
"""Input channels that a weight's gradient in single precision reads as they lie: an image's."""
_REDUCES = 6.0
"""Elements of an input over those of a weight from which threads share the batch in single precision."""
_WIDEST = 3
"""Kernel of a depthwise convolution whose weight's gradient oneDNN computes from channels_last images."""
_LARGEST = 14
"""Side of a kernel whose weight's gradient is computed as those of smaller ones are."""
_PARTS = 4.25
"""What a thread takes for the gradient of a larger one, in weights in single precision."""


def onednn_convolution(
    y: Like, x: Like, weight: Like, bias: Any, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, output_padding: list[int], groups: int,
) -> int:  # fmt: skip
    """Input and weight are reordered into oneDNN's layout; the result is computed there, and then copied."""
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
    """First the input's gradient, then the weight's, each in oneDNN's layout before it is copied."""
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
    """Groups of other than whole blocks of channels, which are neither rounded up nor reordered."""
    return groups > 1 and weight.size[1] > 1 and weight.size[1] % _LANES > 0 and not transposed


def _weight_gradient_bytes(grad: Like, x: Like, weight: Like, stride: list[int], transposed: bool) -> int:
    source, target = (grad, x) if transposed else (x, grad)
    if weight.size[-1] > _LARGEST and (x.dtype not in HALVES or source.size[1] >= _LANES):
        return round(_PARTS * num_threads() * 4 * weight.num_elements) + weight.num_bytes
    images = 0 if _is_channels_last(x, weight) else _source_bytes(source, to_weight=True) + _blocked_bytes(target)
    weights = _blocked_weight_bytes(weight, x.dtype.itemsize)
    return images + weights + _reduction_bytes(source, target, x, weight, stride)


def _wide_depthwise_bytes(grad: Like, x: Like, weight: Like, groups: int) -> int:
    """Kernels wider than 3 have no kernel of their own for images as they lie: each group's gradient is in blocks of 16
    by 16 channels; in half precision also in single precision, with an image of either whose groups have 16 channels
    each."""
    blocked = groups * _rounded(weight.size[0] // groups) * _LANES * math.prod(weight.size[2:])
    if weight.dtype not in HALVES:
        return blocked * weight.dtype.itemsize
    images = (x.num_bytes + grad.num_bytes) // max(1, x.size[0])
    return blocked * (weight.dtype.itemsize + 4) + _LANES * images


def _columns_bytes(grad: Like, weight: Like) -> int:
    """Nor for images in planes: torch unfolds one group of one image into columns, and multiplies."""
    return math.prod(weight.size[1:]) * math.prod(grad.size[2:]) * weight.dtype.itemsize


def _reduction_bytes(source: Like, target: Like, x: Like, weight: Like, stride: list[int]) -> int:
    """Where threads share the batch, each has a gradient of the weight of its own, in single precision; in half
    precision also where there is one, and an image of the input and of the gradient, transposed."""
    per_thread = _blocked_weight_bytes(weight, 4)
    if x.dtype not in HALVES:
        return (num_threads() - 1) * per_thread if x.num_elements > _REDUCES * weight.num_elements else 0
    num_sharing = _num_sharing(source, target, weight, max(stride) > 1)
    if _is_pointwise(weight) and not _is_channels_last(x, weight):  # a matrix product, which reads them as they lie
        return num_sharing * per_thread
    images = _source_bytes(source, to_weight=True) or source.num_bytes, _blocked_bytes(target)
    return num_sharing * (per_thread + sum(images) // max(1, x.size[0]))


def _num_sharing(source: Like, target: Like, weight: Like, is_strided: bool) -> int:
    """Threads that share the batch; the others share the channels.

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
    """Of an input that lies in another order than the kernel reads."""
    return 0 if x.is_dense(channels_last=is_last) else x.num_bytes


def _source_bytes(x: Like, to_weight: bool = False) -> int:
    """Of what a kernel reads: few channels are read as they lie; in single precision, a weight's gradient does so with
    fewer still, and with some more has them in blocks of half as many."""
    channels = x.size[1]
    if x.dtype in HALVES or not to_weight:
        return 0 if channels < _LANES else _blocked_bytes(x)
    if channels <= _FIRST:
        return 0
    return x.num_bytes // channels * _LANES // 2 if channels <= _LANES // 2 else _blocked_bytes(x)


def _blocked_bytes(x: Like) -> int:
    """Of a tensor (batch, channels, …) in blocks of channels."""
    return x.num_bytes // max(1, x.size[1]) * _rounded(x.size[1])


def _blocked_weight_bytes(weight: Like, itemsize: int) -> int:
    first, second = weight.size[:2]
    blocked = weight.num_elements // max(1, first * second) * _rounded(first)
    few = second + second % 2 if itemsize == 2 else second
    return blocked * (few if second < _LANES else _rounded(second)) * itemsize


def _rounded(channels: int) -> int:
    return -(-channels // _LANES) * _LANES
