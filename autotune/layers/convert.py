"""Conversion in place: a module's class becomes a subclass of its own that answers the calls of its ``forward``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .intercept import Forward
from .sites import Site, structural_sites, traced_sites
from .twins import TWINS, find_twin

__all__ = ["convert", "restore"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Flatten, nn.Embedding)
_SITE = "_autotune_site"
_TWIN = "_autotune_twin"
_TWIN_DTYPES = (torch.float32, torch.float64)
"""Below, people write out casts of their own."""


def convert(model: nn.Module, example: Any = None, *, recompute: bool = False, rounding: bool = False) -> nn.Module:
    """Let a model keep for backward only what its backward reads, which follows ``requires_grad`` at each forward.

    Layers are torch's own classes, exactly (or parametrized): a subclass of one is its author's and is left alone.
    Other modules are converted for the functional calls that their ``forward`` makes.

    Args:
        model: any; what is converted already is left as it is.
        example: what the model is called with (a tensor, a tuple of positional arguments, or a dict of keywords), or a
            function that runs the model that it is given, loss included. It is run once, over tensors without values,
            to see who keeps what; None decides by the model's structure.
        recompute: compute a BatchNorm in training, the residual sum and the ReLU behind it again in backward for the
            convolution that follows, instead of keeping its input: less memory for some time.
        rounding: keep the derivatives of GELU and SiLU in 8 bits where their output is not kept.

    Returns:
        The model, converted in place.
    """
    options = Site(recomputes=recompute, rounds=rounding)
    is_new = not any(_SITE in module.__dict__ for module in model.modules())
    trace = example is not None and is_new
    sites = traced_sites(model, _runner(example), options) if trace else structural_sites(model, options)
    for module in _convertible(model):
        module.__dict__[_SITE] = sites[module]
        module.__dict__[_TWIN] = find_twin(module)
        own: Any = type(module)
        module.__class__ = _converted(own)
    return model


def _runner(example: Any) -> Callable[[nn.Module], Any]:
    if isinstance(example, dict):
        return lambda model: model(**example)
    if isinstance(example, tuple):
        return lambda model: model(*example)
    return (lambda model: model(example)) if isinstance(example, Tensor) else example


def restore(model: nn.Module) -> nn.Module:
    """Undo :func:`convert`, in place."""
    for module in model.modules():
        if _SITE in module.__dict__:
            del module.__dict__[_SITE], module.__dict__[_TWIN]
            module.__class__ = type(module).__mro__[1]
    return model


def _convertible(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        known = _SITE in module.__dict__ or type(module) in _CONTAINERS or isinstance(module, torch.jit.ScriptModule)
        if not known and not _is_subclass_of_a_layer(module):
            yield module


def _is_subclass_of_a_layer(module: nn.Module) -> bool:
    own = type(module)
    if own.__module__.startswith("torch.nn.modules.") or hasattr(module, "parametrizations"):
        return False
    layers = (base for base in own.__mro__[1:] if base.__module__.startswith("torch.nn.modules."))
    return any(base not in (nn.Module, *_CONTAINERS) for base in layers)


@functools.cache
def _converted(base: Any) -> Any:
    """The subclass of a class of modules whose calls are answered; it looks like the class."""

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return base.forward(self, *args, **kwargs)
        with Forward(self.__dict__[_SITE]):
            twin = self.__dict__[_TWIN]
            if twin is not None and _has_plain_input(args, kwargs):
                return TWINS[twin](self, args[0])
            return base.forward(self, *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        return _rebuild, (base,), self.__dict__

    looks = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), {"forward": forward, "__reduce_ex__": reduce, **looks})


def _has_plain_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return len(args) == 1 and not kwargs and type(args[0]) is Tensor and args[0].dtype in _TWIN_DTYPES


def _rebuild(base: Any) -> nn.Module:
    """A module of the converted class, for pickle and deepcopy to fill."""
    module: nn.Module = base.__new__(base)
    module.__class__ = _converted(base)
    return module
