"""What kernels take for themselves while they run, and give back: no dispatch mode sees it.

Each entry of a CPU's was measured with torch.profiler's memory events on torch 2.13 (x86, AVX-512, oneDNN). Left out is
what grows with neither batch nor weights: buffers of a thread in attention and the like, below 1 MiB each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .answers import Target
from .cudnn import cudnn_convolution, cudnn_convolution_backward
from .kernels import Kernel, Like
from .slow_convolution import Convolution

__all__ = ["kernel_of", "num_threads", "reckon_with", "scratch_named"]

_aten = torch.ops.aten
_LANES = 16
"""Channels of a block of oneDNN's layout; channels are rounded up to it."""
_FIRST = 3
"""Input channels of a convolution that reads its input as it lies: an image's."""
_REDUCES = 6.0
"""Elements of an input over those of a weight from which threads share the batch in single precision."""
_WIDEST = 3
"""Kernel of a depthwise convolution whose weight's gradient oneDNN computes from channels_last images."""
_PACKED_BYTES = 2**18
"""What a matrix product in half precision packs its operands into."""
_MOST_SUMS_BYTES = 2**21
"""What it adds up in single precision at once."""
_HALVES = (torch.bfloat16, torch.float16)

_num_threads: int | None = None
"""That a training is to compute with, where it is not as many as this process does."""


def reckon_with(num_threads: int) -> None:
    """Say that a training is to compute with so many threads, whatever this process does."""
    global _num_threads
    _num_threads = num_threads


def num_threads() -> int:
    """That a training computes with."""
    return _num_threads or torch.get_num_threads()


def kernel_of(target: Target, func: Any, args: Any, kwargs: Any, results: Any) -> Kernel | None:
    """An operation with what it takes on top of its results; None for one that is not in the target's table.

    Args:
        target: the device that is planned for.
        func: an overload, as a dispatch mode sees it.
        args: of tensors with or without values.
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


def _convolution(
    y: Like, x: Like, weight: Like, bias: Any, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, output_padding: list[int], groups: int,
) -> int:  # fmt: skip
    """Input and weight are reordered into oneDNN's layout; the result is computed there, and then copied."""
    is_last = _is_channels_last(x, weight)
    convolution = Convolution(x, weight, stride, padding, dilation, transposed, output_padding, groups)
    if convolution.is_slow(num_threads()):
        return _copy_bytes(x, is_last) + convolution.forward_bytes(y)
    blocked_weight = _blocked_weight_bytes(weight, x.dtype.itemsize)
    if is_last:
        return _copy_bytes(x, True) + blocked_weight
    blocked = _blocked_bytes(y)
    computing = _source_bytes(x) + blocked_weight + blocked - y.num_bytes
    if x.dtype in _HALVES and _is_pointwise(weight):  # the result is there when the copy is made
        return _copy_bytes(x, False) + computing + y.num_bytes
    plain = y.num_bytes if transposed and max(stride) > 1 else 0
    return _copy_bytes(x, False) + max(computing, blocked + plain)


def _convolution_backward(
    results: Any, grad: Like, x: Like, weight: Like, bias_sizes: Any, stride: list[int], padding: list[int],
    dilation: list[int], transposed: bool, output_padding: list[int], groups: int, wanted: list[bool],
) -> int:  # fmt: skip
    """First the input's gradient, then the weight's, each in oneDNN's layout before it is copied."""
    is_last = _is_channels_last(x, weight)
    convolution = Convolution(x, weight, stride, padding, dilation, transposed, output_padding, groups)
    if convolution.is_slow(num_threads()):
        return _copy_bytes(grad, is_last) + convolution.backward_bytes(grad)
    blocked_weight = _blocked_weight_bytes(weight, x.dtype.itemsize)
    source, blocked_grad = (0, 0) if is_last else (_source_bytes(x), _blocked_bytes(grad))
    grad_x, grad_weight = (one.num_bytes if wants else 0 for one, wants in zip((x, weight), wanted, strict=False))
    is_depthwise = groups > 1 and weight.size[1] == 1 and not transposed
    is_wide = is_depthwise and weight.size[-1] > _WIDEST
    most = 0
    if wanted[0] and is_last:
        most = grad_x + blocked_weight
    elif wanted[0]:
        blocked_x = _blocked_bytes(x)
        is_copied = groups == 1 or weight.size[1] > _LANES or (is_depthwise and x.dtype in _HALVES)
        is_strided = max(stride) > 1 and not transposed and is_copied  # computed plain, and copied once more
        most = max(blocked_grad + blocked_weight + blocked_x, blocked_x + grad_x * (2 if is_strided else 1))
    if wanted[1] and is_wide and not is_last:
        most = max(most, grad_x + grad_weight + _columns_bytes(grad, weight))
    elif wanted[1]:
        computing = source + blocked_grad + blocked_weight + _reduction_bytes(grad, x, weight, stride, transposed)
        if is_wide:
            computing += _wide_depthwise_bytes(grad, x, weight, groups)
        most = max(most, grad_x + computing, grad_x + (3 * grad_weight if is_last else blocked_weight + grad_weight))
    return _copy_bytes(grad, is_last) + max(0, most - grad_x - grad_weight)


def _wide_depthwise_bytes(grad: Like, x: Like, weight: Like, groups: int) -> int:
    """Kernels wider than 3 have no kernel of their own for images as they lie: each group's gradient is in blocks of 16
    by 16 channels; in half precision also in single precision, with an image of either whose groups have 16 channels
    each."""
    blocked = groups * _rounded(weight.size[0] // groups) * _LANES * math.prod(weight.size[2:])
    if weight.dtype not in _HALVES:
        return blocked * weight.dtype.itemsize
    images = (x.num_bytes + grad.num_bytes) // max(1, x.size[0])
    return blocked * (weight.dtype.itemsize + 4) + _LANES * images


def _columns_bytes(grad: Like, weight: Like) -> int:
    """Nor for images in planes: torch unfolds one group of one image into columns, and multiplies."""
    return math.prod(weight.size[1:]) * math.prod(grad.size[2:]) * weight.dtype.itemsize


def _reduction_bytes(grad: Like, x: Like, weight: Like, stride: list[int], transposed: bool) -> int:
    """Where threads share the batch, each has a gradient of the weight of its own, in single precision; in half
    precision also where there is one, and an image of the input and of the gradient, transposed."""
    per_thread = _blocked_weight_bytes(weight, 4)
    if x.dtype not in _HALVES:
        return (num_threads() - 1) * per_thread if x.num_elements > _REDUCES * weight.num_elements else 0
    source, target = (grad, x) if transposed else (x, grad)
    num_sharing = _num_sharing(source, target, weight, max(stride) > 1)
    if _is_pointwise(weight) and not _is_channels_last(x, weight):  # a matrix product, which reads them as they lie
        return num_sharing * per_thread
    images = _source_bytes(source) or source.num_bytes, _blocked_bytes(target)
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


def _copy_bytes(x: Like, is_last: bool) -> int:
    """Of an input that lies in another order than the kernel reads."""
    return 0 if x.is_dense(channels_last=is_last) else x.num_bytes


def _source_bytes(x: Like) -> int:
    return 0 if x.size[1] <= _FIRST else _blocked_bytes(x)


def _blocked_bytes(x: Like) -> int:
    """Of a tensor (batch, channels, …) in blocks of channels."""
    return x.num_bytes // max(1, x.size[1]) * _rounded(x.size[1])


def _blocked_weight_bytes(weight: Like, itemsize: int) -> int:
    first, second = weight.size[:2]
    blocked = weight.num_elements // max(1, first * second) * _rounded(first)
    return blocked * (second if second <= _FIRST else _rounded(second)) * itemsize


def _rounded(channels: int) -> int:
    return -(-channels // _LANES) * _LANES


def _batch_norm_backward(results: Any, grad: Like, x: Like, *rest: Any, **options: Any) -> int:
    """A buffer as large as the input's gradient."""
    wanted = rest[-1] if rest else options["output_mask"]
    return x.num_bytes if wanted[0] else 0


def _pointwise(result: Like, *args: Any, **kwargs: Any) -> int:
    """Operands of another type than the one that is computed in are cast whole."""
    parts = [one for one in (*args, *kwargs.values()) if isinstance(one, Like) and one.size]
    if not parts:
        return 0
    dtype = parts[0].dtype
    for one in parts[1:]:
        dtype = torch.promote_types(dtype, one.dtype)
    return sum(one.num_elements * dtype.itemsize for one in parts if one.dtype not in (dtype, torch.bool))


def _reduced(result: Like, x: Like, *args: Any, **kwargs: Any) -> int:
    """Half precision is cast whole before it is added up."""
    return x.num_elements * 4 if x.dtype in _HALVES else 0


def _softmax(result: Like, x: Like, *args: Any, **kwargs: Any) -> int:
    """Read in order, and copied where it does not lie so."""
    return _copy_bytes(x, False)


def _softmax_backward(result: Like, grad: Like, y: Like, *args: Any, **kwargs: Any) -> int:
    """The same of both."""
    return _copy_bytes(grad, False) + _copy_bytes(y, False)


def _dropout(results: Any, x: Like, *args: Any, **kwargs: Any) -> int:
    """The mask in the input's own type."""
    return x.num_bytes


def _product(result: Like, a: Like, b: Like, *args: Any, **kwargs: Any) -> int:
    """Packed operands; and where a weight's gradient is summed over the batch, the sums in single precision."""
    if a.dtype not in _HALVES:
        return 0
    sums = 4 * a.size[0] * b.size[-1] if a.stride[-2] == 1 and a.size[0] > 1 else 0
    return min(_PACKED_BYTES, a.num_bytes + b.num_bytes) + min(sums, _MOST_SUMS_BYTES)


def _sum_and_product(result: Like, bias: Like, a: Like, b: Like, *args: Any, **kwargs: Any) -> int:
    return _product(result, a, b)


def _recurrent(results: Any, x: Like, *rest: Any) -> int:
    """The weights in blocks; in single precision, what goes into the gates of each step too."""
    weights: tuple[Like, ...] = rest[:4]
    steps = 0 if x.dtype in _HALVES else 4 * math.prod(x.size[:2]) * weights[1].size[0]
    return sum(one.num_bytes for one in weights) + steps


def _recurrent_backward(results: Any, x: Like, *rest: Any) -> int:
    """The weights and their gradients in blocks, these in single precision; the gates' gradients of each step, or in
    half precision the states'."""
    weights: tuple[Like, ...] = rest[:4]
    is_half = x.dtype in _HALVES
    steps = 4 * math.prod(x.size[:2]) * weights[1].size[1 if is_half else 0]
    return (3 if is_half else 2) * sum(one.num_bytes for one in weights) + steps


_ON_CPU: dict[Any, Callable[..., int]] = {
    _aten.convolution: _convolution,
    _aten.convolution_backward: _convolution_backward,
    _aten.native_batch_norm_backward: _batch_norm_backward,
    _aten.mkldnn_rnn_layer: _recurrent,
    _aten.mkldnn_rnn_layer_backward: _recurrent_backward,
    _aten.native_dropout: _dropout,
    _aten._log_softmax: _softmax,
    _aten._softmax: _softmax,
    _aten._log_softmax_backward_data: _softmax_backward,
    _aten._softmax_backward_data: _softmax_backward,
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
