"""Which modules compute each position of a sequence by itself: the feed-forward parts of a transformer's blocks."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ...errors import Caught

_ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.ELU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Hardswish, nn.Softplus,
)  # fmt: skip
_FUNCTIONS = frozenset((
    operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.neg,
    torch.add, torch.sub, torch.mul, torch.div, torch.pow, torch.tanh, torch.sigmoid, torch.erf, torch.relu,
    F.relu, F.relu6, F.leaky_relu, F.gelu, F.silu, F.elu, F.mish, F.hardswish, F.softplus, F.tanh, F.sigmoid,
))  # fmt: skip
_METHODS = frozenset(("add", "sub", "mul", "div", "pow", "tanh", "sigmoid", "relu", "to", "float", "type_as"))


@dataclass(frozen=True)
class FeedForward:
    """A module whose output at a position depends on its input at that position alone."""

    module: nn.Module
    dropout: nn.Module | None
    """What drops elements of its output, as the last that it does; None where nothing is drawn."""


def find_feed_forwards(model: nn.Module) -> list[FeedForward]:
    """The outermost such modules below a model that are wider inside than what they are given: each is shown to be one
    by its operations, symbolically. One that draws random numbers before its last operation is left out."""
    found = (part for child in model.children() for part in _within(child))
    return list({part.module: part for part in found}.values())


@dataclass(frozen=True)
class Pair:
    """Linear layers, ``wide``, whose outputs reach one layer, ``narrow``, alone, and that element by element, where
    their ``part`` is called as a whole."""

    part: nn.Module
    wide: tuple[nn.Linear, ...]
    narrow: nn.Linear


def find_pairs(model: nn.Module) -> list[Pair]:
    """Of a model's feed-forward parts, or of a model that is one: each layer is in one pair at most."""
    parts = [model] if _widens(model) and _feed_forward(model) else [one.module for one in find_feed_forwards(model)]
    return [pair for part in parts for pair in _pairs(part)]


def _pairs(part: nn.Module) -> Iterator[Pair]:
    graph = _Tracer().trace(part)
    called = {node: part.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"}
    num_calls = Counter(called.values())
    linear = {node: one for node, one in called.items() if isinstance(one, nn.Linear) and num_calls[one] == 1}
    paired: set[fx.Node] = set()
    for node, narrow in linear.items():
        sources, between = _reached_from(node, linear, called)
        ends_here = all(user is node or user in between for one in sources | between for user in one.users)
        is_whole = all(linear[one].out_features == narrow.in_features for one in sources)  # none is repeated
        if sources and ends_here and is_whole and not sources & paired:
            paired |= {*sources, node}
            yield Pair(part, tuple(linear[one] for one in linear if one in sources), narrow)


def _reached_from(
    node: fx.Node, linear: Mapping[fx.Node, nn.Linear], called: Mapping[fx.Node, nn.Module]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """The layers that a layer's input is computed from element by element, and what does so; no layers where it is
    computed otherwise."""
    sources: set[fx.Node] = set()
    between: set[fx.Node] = set()
    waiting = [*node.all_input_nodes]
    while waiting:
        one = waiting.pop()
        if one in linear:
            sources.add(one)
        elif one in between:
            continue
        elif isinstance(called.get(one), (nn.Identity, *_ACTIVATIONS)) or one.target in _FUNCTIONS | _METHODS:
            between.add(one)
            waiting += one.all_input_nodes
        else:
            return set(), set()
    return sources, between


def _within(module: nn.Module) -> Iterator[FeedForward]:
    found = _feed_forward(module) if _widens(module) else None
    if found is not None:
        yield found
        return
    for child in module.children():
        yield from _within(child)


def _widens(module: nn.Module) -> bool:
    """Whether a module consists of layers that may be a feed-forward part's, some of them wider than what it is given;
    asked before its forward is run."""
    if "forward" in vars(module) or not any(True for _ in module.children()):
        return False
    widths = [shape for one in module.modules() if (shape := _features(one)) is not None]
    return (
        len(widths) > 1 and max(out for _, out in widths) > widths[0][0] and not any(map(_is_hooked, module.modules()))
    )


def _is_hooked(module: nn.Module) -> bool:
    """Whether more than its forward is called with it."""
    return bool(module._forward_hooks or module._forward_pre_hooks or hasattr(module, "parametrizations"))


def _features(module: nn.Module) -> tuple[int, int] | None:
    """Of a linear layer: how many it is given, and how many it gives."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils":
        return int(module.nx), int(module.nf)  # type: ignore[arg-type]
    return None


class _Tracer(fx.Tracer):
    """Looks into modules that are not known to compute each position by itself."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return _is_known(m) or isinstance(m, nn.Dropout)


def _is_known(module: nn.Module) -> bool:
    norms = (nn.LayerNorm, nn.RMSNorm)
    is_norm = isinstance(module, norms) and len(module.normalized_shape) == 1
    return is_norm or isinstance(module, (nn.Identity, *_ACTIVATIONS)) or _features(module) is not None


def _feed_forward(module: nn.Module) -> FeedForward | None:
    graph = None
    with Caught():  # a forward that asks for values, or for shapes, is none that is sure
        graph = _Tracer().trace(module)
    if graph is None:
        return None
    inputs = [node for node in graph.nodes if node.op == "placeholder" and node.users]
    (last,) = (node.args[0] for node in graph.nodes if node.op == "output")
    if len(inputs) != 1 or not isinstance(last, fx.Node) or last is inputs[0]:
        return None
    called = {node: module.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"}
    if not all(_is_of_position(node, called.get(node), module) for node in graph.nodes):
        return None
    drawn = [node for node, one in called.items() if isinstance(one, nn.Dropout) and one.p > 0]
    return FeedForward(module, called[last] if drawn else None) if drawn in ([], [last]) else None


def _is_of_position(node: fx.Node, called: nn.Module | None, root: nn.Module) -> bool:
    """Whether an operation computes each position by itself, and leaves what the module is given as it is."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "get_attr":
        return bool(operator.attrgetter(str(node.target))(root).ndim <= 1)
    first = node.args[0] if node.args else None
    if node.kwargs.get("inplace") or (getattr(called, "inplace", False) and _is_input(first)):
        return False
    if called is not None:
        return isinstance(called, nn.Dropout) or _is_known(called)
    if node.op == "call_method" and node.target == "chunk":
        return bool((node.kwargs.get("dim") or node.args[-1]) == -1)
    if node.target is operator.getitem:
        return isinstance(first, fx.Node) and first.target == "chunk" and isinstance(node.args[1], int)
    return node.target in (_METHODS if node.op == "call_method" else _FUNCTIONS)


def _is_input(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "placeholder"
