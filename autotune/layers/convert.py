"""Conversion in place: a module's class becomes a subclass of its own that answers the calls of its ``forward``."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._pytree import tree_map_only

from ..internals.fake_tensors import FakeTensor
from .equivalent_ops import EquivalentOp, find_equivalent_op
from .intercept import Forward, stock
from .sites import Site, structural_sites, traced_sites

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Flatten, nn.Embedding)
_ORIGINALS: dict[type, Any] = {}
"""For each converted class the one that it was made from."""
_SITE = "_autotune_site"
"""On a converted module: its :class:`_Call`."""
_PLAIN = (Tensor, FakeTensor)
_OP_DTYPES = (torch.float32, torch.float64)
"""Below, people write out casts of their own."""


class _Call(NamedTuple):
    """Of a module's ``forward``."""

    site: Site | None
    """None where it is spared."""
    op: EquivalentOp | None
    """What it computes, where that is a function of torch's."""


def convert(
    model: nn.Module,
    example: Any = None,
    *,
    recompute: bool = False,
    rounding: bool = False,
    spared: Iterable[nn.Module] = (),
) -> nn.Module:
    """Let a model keep for backward only what its backward reads, which follows ``requires_grad`` at each forward.

    Layers are torch's own classes, exactly (or parametrized): a subclass of one is its author's and is left alone.
    Other modules are converted for the functional calls that their ``forward`` makes.

    Args:
        model: any; what was converted already is converted anew.
        example: what the model is called with (a tensor, a tuple of positional arguments, or a dict of keywords), or a
            function that runs the model that it is given, loss included. It is run once, over fake tensors,
            to see who keeps what; None decides by the model's structure.
        recompute: compute a BatchNorm in training, the residual sum and the ReLU behind it again in backward for the
            convolution that follows, instead of keeping its input: less memory for some time.
        rounding: keep the derivatives of GELU and SiLU in 8 bits where their output is not kept.
        spared: modules of the model that stay as they are, with all that is in them.

    Returns:
        The model, converted in place.
    """
    restore(model)
    left = {module for one in spared for module in one.modules()}
    options = Site(recomputes=recompute, rounds=rounding)
    trace = example is not None
    sites = traced_sites(model, _runner(example), options) if trace else structural_sites(model, options)
    for module in _convertible(model):
        is_left = module in left  # its calls must not be answered as those of a module around it
        call = _Call(None, None) if is_left else _Call(sites[module], find_equivalent_op(module))
        module.__dict__[_SITE] = call
        own: Any = type(module)
        module.__class__ = _converted_parametrized(own) if hasattr(module, "parametrizations") else _converted(own)
    return model


def _runner(example: Any) -> Callable[[nn.Module], Any]:
    if isinstance(example, Mapping):
        return lambda model: model(**_copied(example))
    if isinstance(example, tuple):
        return lambda model: model(*_copied(example))
    if isinstance(example, Tensor):
        return lambda model: model(_copied(example))
    if not callable(example):
        wanted = "a tensor, a tuple of arguments, a dict of keywords, or a function of the model"
        raise TypeError(f"example: expected {wanted}, but got {type(example).__name__}.")
    run: Callable[[nn.Module], Any] = example
    return run


def _copied(example: Any) -> Any:
    """An example that a model may work in place on, and whose gradient shows who keeps what."""
    return tree_map_only(Tensor, lambda x: x.detach().requires_grad_(x.is_floating_point()).clone(), example)


def restore(model: nn.Module) -> nn.Module:
    """Undo :func:`convert`, in place."""
    for module in model.modules():
        if _SITE in module.__dict__:
            del module.__dict__[_SITE]
            module.__class__ = _ORIGINALS.get(type(module), type(module))
    return model


def _convertible(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        known = type(module) in _CONTAINERS or isinstance(module, (torch.jit.ScriptModule, LazyModuleMixin))
        if not known and not _is_subclass_of_a_layer(module) and not _watches_subclasses(type(module)):
            yield module


def _is_subclass_of_a_layer(module: nn.Module) -> bool:
    own = type(module)
    if own.__module__.startswith("torch.nn.modules.") or hasattr(module, "parametrizations"):
        return False
    layers = (base for base in own.__mro__[1:] if base.__module__.startswith("torch.nn.modules."))
    return any(base not in (nn.Module, *_CONTAINERS) for base in layers)


def _watches_subclasses(own: type) -> bool:
    """Whether the making of a subclass would run code of the class's author, such as a registry's."""
    hooked = (base for base in own.__mro__ if base is not object and "__init_subclass__" in vars(base))
    return any(base.__module__.partition(".")[0] not in ("torch", "transformers") for base in hooked)


def _converted_parametrized(own: type) -> type:
    """As torch makes the class of a parametrized module: right below the module's own, which is taken back to later."""
    parts = {name: part for name, part in vars(own).items() if name not in ("__dict__", "__weakref__")}
    found = type(own.__name__, (_converted(own.__bases__[0]),), parts)
    _ORIGINALS[found] = own
    return found


@functools.cache
def _converted(base: Any) -> Any:
    """The subclass of a class of modules whose calls are answered; it looks like the class."""

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call: _Call | None = self.__dict__.get(_SITE)
        if call is None or torch.compiler.is_compiling():
            return base.forward(self, *args, **kwargs)
        with Forward(call.site) if call.site is not None else stock():
            if call.op is not None and _has_plain_input(args, kwargs) and call.op.holds(self):
                return call.op(self, args[0])
            return base.forward(self, *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        made, of, *state = base.__reduce_ex__(self, protocol)
        return (_rebuild, (base,), *state) if made is copyreg.__newobj__ else (made, of, *state)  # type: ignore[attr-defined]

    looks = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    found = type(base.__name__, (base,), {"forward": forward, "__reduce_ex__": reduce, **looks})
    _ORIGINALS[found] = base
    return found


def _has_plain_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return len(args) == 1 and not kwargs and type(args[0]) in _PLAIN and args[0].dtype in _OP_DTYPES


def _rebuild(base: Any) -> nn.Module:
    """A module of the converted class, for pickle and deepcopy to fill."""
    module: nn.Module = base.__new__(base)
    module.__class__ = _converted(base)
    return module
