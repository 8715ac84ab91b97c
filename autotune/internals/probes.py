"""Whether a private part is there, and is used by its library as it was in the version that was tried."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.machinery import PathFinder
from types import CodeType, ModuleType
from typing import Any

from .table import FEATURES, TRIED, Feature

_DISTRIBUTION = {"yaml": "pyyaml"}
"""Names of packages that are not those of their modules."""


class _NotLoaded(Exception):
    """It lies in a module that is there, and not imported, or behind what another has put in its place."""


@cache
def lost(name: str) -> str | None:
    """Why a feature cannot be had with the libraries that this process has loaded; None where it can. What is in a
    module that is not loaded is taken to be there, if the module is.

    Args:
        name: of a feature; one that is not in the table goes by no private parts, and is always there.
    """
    features = (feature for feature in FEATURES if feature.name == name)
    return next((reason for feature in features for reason in _missing(feature, imports=False)), None)


def broken(imports: bool = False) -> Iterator[tuple[Feature, str]]:
    """Each part that is missing, with the feature that goes by it.

    Args:
        imports: import what is not loaded; a library that is not installed is passed over.
    """
    for feature in FEATURES:
        for reason in _missing(feature, imports):
            yield feature, reason


def _missing(feature: Feature, imports: bool) -> Iterator[str]:
    for part in feature.parts:
        library = part.partition(".")[0]
        try:
            held = _holds(part, imports)
        except _NotLoaded:
            continue
        if not held:
            found = importlib.metadata.version(_DISTRIBUTION.get(library, library))
            yield f"{library} {found} has no {_said(part)} as {library} {TRIED[library]} has"


def _said(part: str) -> str:
    path, _, name = part.partition(":")
    return f"{name} in {path}" if name else path


def _holds(part: str, imports: bool) -> bool:
    """
    Raises:
        _NotLoaded: it cannot be told without an import.
    """
    path, _, name = part.partition(":")
    path, _, parameters = path.partition("(")
    if (probe := _PROBES.get(path)) is not None:
        return _succeeds(probe, imports)
    try:
        found = _find(path, imports)
    except LookupError:
        return False
    if name:
        function = inspect.unwrap(found)
        if function.__module__.partition(".")[0] != path.partition(".")[0]:
            raise _NotLoaded  # another library, or a job, has put its own there
        return name in _names(function.__code__)
    if parameters:
        wanted = parameters.removesuffix(")").split(", ")
        return [*inspect.signature(found).parameters][: len(wanted)] == wanted
    return True


def _succeeds(probe: Callable[[], bool], imports: bool) -> bool:
    _module("torch", imports)
    try:
        return probe()
    except (AttributeError, TypeError, RuntimeError):
        return False


def _find(path: str, imports: bool) -> Any:
    head, *rest = path.split(".")
    found, known = _module(head, imports), head
    for name in rest:
        known = f"{known}.{name}"
        if not isinstance(found, ModuleType):
            if not hasattr(found, name):
                raise LookupError(known)
            found = getattr(found, name)
        elif name in vars(found):
            found = vars(found)[name]
        elif PathFinder.find_spec(known, vars(found).get("__path__", [])) is not None:
            found = _module(known, imports)
        elif hasattr(found, name):  # made as it is asked for
            found = getattr(found, name)
        else:
            raise LookupError(known)
    return found


def _module(name: str, imports: bool) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    if not imports:
        raise _NotLoaded
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name and "." not in name:
            raise _NotLoaded from None  # the library is not installed
        raise LookupError(name) from error
    except ImportError as error:
        raise LookupError(name) from error


def _names(code: CodeType) -> set[str]:
    """Names and words that a function goes by, with those of the functions within it."""
    found = {*code.co_names, *(one for one in code.co_consts if isinstance(one, str))}
    return found.union(*(_names(one) for one in code.co_consts if isinstance(one, CodeType)))


def _calls_what_is_compiled() -> bool:
    """A module with a ``_compiled_call_impl`` is called through that."""
    from torch import nn

    module: Any = nn.Identity()
    vars(module)["_compiled_call_impl"] = lambda x: (x,)
    return bool(module(1) == (1,))


def _module_has(name: str) -> Callable[[], bool]:
    """A module has an attribute of this name, whoever has replaced its ``__init__``."""

    def probe() -> bool:
        from torch import nn

        return name in vars(nn.Identity())

    return probe


def _hooks_are_told() -> bool:
    """The innermost hooks on saved tensors are returned, and None where there are none."""
    import torch

    innermost = torch._C._autograd._top_saved_tensors_default_hooks
    with torch.autograd.graph.saved_tensors_hooks(id, _same):
        hooks = innermost(False)
    return hooks is not None and tuple(hooks) == (id, _same)


def _same(x: Any) -> Any:
    return x


def _node_has(make: Callable[[Any], Any], *names: str) -> Callable[[], bool]:
    """The node of what is made of a tensor of four numbers that want gradients has attributes of these names."""

    def probe() -> bool:
        import torch

        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            node = make(torch.ones(2, 2, device="cpu", requires_grad=True)).grad_fn
        return all(hasattr(node, name) for name in names)

    return probe


def _normalized(x: Any) -> Any:
    from torch.nn import functional as F

    return F.batch_norm(x, None, None, training=True)


def _mean_loss(x: Any) -> Any:
    from torch.nn import functional as F

    return F.mse_loss(x, x.detach())


_NODE = "torch.autograd.graph.Node"
_PROBES: dict[str, Callable[[], bool]] = {
    "torch.nn.Module._compiled_call_impl": _calls_what_is_compiled,
    "torch.nn.Module._buffers": _module_has("_buffers"),
    "torch.nn.Module._forward_hooks": _module_has("_forward_hooks"),
    "torch.nn.Module._forward_pre_hooks": _module_has("_forward_pre_hooks"),
    "torch._C._autograd._top_saved_tensors_default_hooks": _hooks_are_told,
    f"{_NODE}._sequence_nr": _node_has(lambda x: x * 2, "_sequence_nr"),
    f"{_NODE}._register_hook_dict": _node_has(lambda x: x * 2, "_register_hook_dict"),
    f"{_NODE}._saved_other": _node_has(lambda x: x * 2, "_saved_other"),
    f"{_NODE}._saved_reduction": _node_has(_mean_loss, "_saved_reduction"),
    f"{_NODE}._saved_result1": _node_has(_normalized, "_saved_result1"),
    f"{_NODE}._saved_result2": _node_has(_normalized, "_saved_result2"),
}
"""By path, where that it is there is not enough, or it is there on objects alone."""
