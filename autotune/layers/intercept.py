"""The functional calls of a converted module's ``forward``, answered by this package's functions.

The mode is entered by the module whose ``forward`` makes the calls, so that a checkpoint's recomputation, which runs
outside the root, meets it too. Modules within modules share one mode, and say whose calls it sees.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from ..internals.fake_tensors import FakeTensor
from . import activation, attention, convolution, dropout, loss, matmul, norm, pooling, rematerialization
from .graph import saved_tensors_hooks
from .sites import Site

_PLAIN = frozenset((Tensor, nn.Parameter, FakeTensor))
"""Not a distributed or a quantized tensor: those know better."""
_ACTIVATIONS = (F.hardswish, F.softplus, F.mish, F.elu)

_MATMULS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm)
_SUMS = (torch.add, torch.Tensor.add, torch.Tensor.add_, torch.Tensor.__add__, torch.Tensor.__iadd__)

_TABLE: dict[Any, Callable[..., Any]] = {
    F.linear: matmul.linear,
    torch.addmm: matmul.addmm,
    **{function: matmul.mul(function) for function in (torch.mul, torch.Tensor.mul, torch.Tensor.__mul__)},
    **{function: matmul.matmul(function) for function in _MATMULS},
    F.conv1d: convolution.conv(1),
    F.conv2d: convolution.conv(2),
    F.conv3d: convolution.conv(3),
    F.conv_transpose1d: convolution.conv_transpose(1),
    F.conv_transpose2d: convolution.conv_transpose(2),
    F.conv_transpose3d: convolution.conv_transpose(3),
    F.batch_norm: norm.batch_norm,
    F.instance_norm: norm.instance_norm,
    F.layer_norm: norm.keep_input(F.layer_norm),
    F.group_norm: norm.keep_input(F.group_norm),
    F.rms_norm: norm.rms_norm,
    F.relu: activation.relu,
    torch.relu: activation.relu,
    torch.Tensor.relu: activation.relu,
    F.leaky_relu: activation.leaky_relu,
    F.relu6: activation.relu6,
    F.hardtanh: activation.hardtanh,
    F.gelu: activation.gelu,
    F.silu: activation.silu,
    **{function: activation.keep_input(function) for function in _ACTIVATIONS},
    **{function: rematerialization.add(function) for function in _SUMS},
    F.dropout: dropout.dropout,
    F.max_pool1d: pooling.max_pool1d,
    F.max_pool2d: pooling.max_pool(2),
    F.max_pool3d: pooling.max_pool(3),
    F.avg_pool1d: pooling.avg_pool1d,
    F.avg_pool2d: pooling.avg_pool(2),
    F.avg_pool3d: pooling.avg_pool(3),
    F.adaptive_avg_pool1d: pooling.adaptive_avg_pool1d,
    F.adaptive_avg_pool2d: pooling.adaptive_avg_pool(2),
    F.adaptive_avg_pool3d: pooling.adaptive_avg_pool(3),
    F.scaled_dot_product_attention: attention.scaled_dot_product_attention,
    **{function: attention.softmax(function) for function in (F.softmax, torch.softmax, torch.Tensor.softmax)},
    F.cross_entropy: loss.cross_entropy,
}
"""What is answered, and by what: each takes the site, and then what torch's own takes."""


def _seen_through(function: Any) -> Any:
    """A function of ``torch.nn.functional`` that is written in Python, so that the mode sees the calls that it makes.

    Only its question whether a mode wants to answer it as a whole is left out.
    """
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    through = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    through.__kwdefaults__ = function.__kwdefaults__
    return through


_SEEN_THROUGH = {F.multi_head_attention_forward: _seen_through(F.multi_head_attention_forward)}


class _Current(threading.local):
    """Whose calls the mode sees, in this thread."""

    forward: Forward | None = None


_current = _Current()


class Forward:
    """One run of a module's ``forward``: a context."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.hooks: Any = None
        self._outer: Forward | None = None
        self._mode: _Mode | None = None

    def __enter__(self) -> Forward:
        self._outer, _current.forward = _current.forward, self
        self.hooks = saved_tensors_hooks()
        if self._outer is None:
            self._mode = _Mode()
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(*error)  # type: ignore[no-untyped-call]
        _current.forward = self._outer


@contextmanager
def stock() -> Iterator[None]:
    """What is called in it is torch's own, whatever module is around it."""
    outer, _current.forward = _current.forward, None
    try:
        yield
    finally:
        _current.forward = outer


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SEEN_THROUGH:
            with self:  # torch leaves a mode while it answers
                return _SEEN_THROUGH[func](*args, **(kwargs or {}))
        replacement = _TABLE.get(func)
        forward = _current.forward
        if replacement is None or forward is None or not _applies(forward):
            return func(*args, **(kwargs or {}))
        if _are_plain(types, args):
            return replacement(forward.site, *args, **(kwargs or {}))
        output = func(*args, **(kwargs or {}))
        return loss.note_head_of_codes(output, *args, **(kwargs or {})) if func is F.linear else output


def _are_plain(types: Any, args: Any) -> bool:
    """Whether these are tensors of torch's own class, and the first lies in memory with strides."""
    if not _PLAIN.issuperset(types):
        return False
    first = args[0] if args else None
    return not isinstance(first, Tensor) or (first.layout is torch.strided and not first.is_nested)


def _applies(forward: Forward) -> bool:
    """Whether a graph is recorded of the call, and it is the module's own.

    A checkpoint that was entered since the module was is recomputed without the module: such calls stay stock's, both
    times.
    """
    if not torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if forward_ad._current_level >= 0 or torch._C._get_tracing_state() is not None:
        return False
    hooks = saved_tensors_hooks()
    return hooks is forward.hooks or hooks == forward.hooks
