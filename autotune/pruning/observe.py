"""What one forward pass shows: the layers that make the output, and where tokens are mixed by attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ..nested import tensors_in

_MIXES = frozenset(["scaled_dot_product_attention", "matmul", "__matmul__", "bmm", "baddbmm", "einsum"])
"""Functions of two activations, by the name that torch calls them."""


@dataclass(frozen=True)
class Attention:
    """An attention whose heads may be cut: paths of its modules, and its heads."""

    owner: str
    inputs: tuple[str, ...]
    """Projections to queries, keys and values, in this order; or one to all three, queries first."""
    output: str
    num_heads: int
    """Heads of queries."""
    num_groups: int
    """Heads of keys and values: a divisor of ``num_heads``."""
    head_dim: int
    """Width of one head."""


@dataclass(frozen=True)
class Seen:
    """What a forward pass showed."""

    outputs: tuple[Tensor, ...]
    """What the model returned, where it was called as a whole, else the loss: tensors that have gradients."""
    shapes: tuple[tuple[int, ...], ...]
    """Of all that it returned."""
    last: frozenset[nn.Module]
    """Layers whose outputs come into ``outputs`` through no other layer."""
    mixing: frozenset[nn.Module]
    """Layers between whose outputs and inputs attention stands."""
    widths: frozenset[int]
    """Of what these take in, and of what comes out behind them."""
    attentions: tuple[Attention, ...]
    """Those of a known build."""
    called: frozenset[str]
    """Paths of layers with channels."""
    flattened: Mapping[Any, torch.Size]
    """By the gradient function of a tensor that was flattened from its second dimension on, its shape before."""


@dataclass(frozen=True)
class _Mix:
    """Two activations were multiplied: in which call of which module, and the shape of the result."""

    owner: nn.Module
    began: int
    """Length of the log when the owner was called."""
    shape: torch.Size


def observe(model: nn.Module, run: Callable[[nn.Module], Any], parted: bool = False) -> Seen:
    """Run a model once, and say what is where.

    Args:
        model: whose parameters all require gradients.
        run: its forward and loss.
        parted: have no gradient flow through attention, for those who follow gradients from layer to layer: between
            its projections there is nothing to be cut, and splits, caches and shared heads that they know nothing of.
    """
    log: list[nn.Module | _Mix] = []
    stack: list[tuple[nn.Module, int]] = []
    made_by: dict[Any, nn.Module] = {}
    returned: list[Any] = []

    def before(module: nn.Module, _: Any) -> None:
        stack.append((module, len(log)))

    def after(module: nn.Module, _: Any, result: Any) -> None:
        stack.pop()
        if module is model:
            returned[:] = [result]
        if width(module) is not None:
            log.append(module)
            made_by.update((one.grad_fn, module) for one in tensors_in(result) if one.grad_fn is not None)

    def mixed(result: Tensor) -> Tensor:
        owners = (one for one in reversed(stack) if any(isinstance(m, nn.Linear) for m in one[0].modules()))
        owner, began = next(owners, stack[0] if stack else (model, 0))
        log.append(_Mix(owner, began, result.shape))
        return result.detach().requires_grad_() if parted else result

    flattened: dict[Any, torch.Size] = {}
    with _hooked(model, before, after), _Watch(mixed, flattened):
        loss = run(model)
    outputs = tuple(one for one in tensors_in(returned) if one.grad_fn is not None)
    outputs = outputs or tuple(one for one in tensors_in(loss) if one.grad_fn is not None)
    shapes = tuple(tuple(one.shape) for one in tensors_in(returned))
    last = frozenset(_first_reached(outputs, made_by))
    names = {module: name for name, module in model.named_modules()}
    called = frozenset(names[one] for one in log if isinstance(one, nn.Module))
    return Seen(outputs, shapes, last, *_attentions(log, names), called, flattened)


def width(module: nn.Module) -> int | None:
    """Output channels of a layer that can be cut; None of any other module."""
    if isinstance(module, nn.Linear):
        return module.out_features
    if isinstance(module, _ConvNd):
        return module.out_channels
    return module.embedding_dim if isinstance(module, nn.Embedding) else None


class _Watch(TorchFunctionMode):
    """Has each product of two activations replaced, and notes what is flattened."""

    def __init__(self, mixed: Callable[[Tensor], Tensor], flattened: dict[Any, torch.Size]) -> None:
        super().__init__()
        self._mixed, self._flattened = mixed, flattened

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _MIXES and isinstance(result, Tensor):
            made = [one for one in tensors_in([*args, *(kwargs or {}).values()]) if one.dim() > 2 and not one.is_leaf]
            if len(made) > 1:
                return self._mixed(result)
        if isinstance(result, Tensor) and result.dim() == 2 and result.grad_fn is not None and args:
            before = getattr(args[0], "shape", torch.Size())
            if len(before) > 2 and before[0] == result.shape[0] and before.numel() == result.numel():
                self._flattened[result.grad_fn] = before
        return result


@contextmanager
def _hooked(model: nn.Module, before: Any, after: Any) -> Iterator[None]:
    """Has every call of every module told of."""
    handles: list[RemovableHandle] = []
    for module in model.modules():
        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first_reached(outputs: tuple[Tensor, ...], made_by: dict[Any, nn.Module]) -> Iterator[nn.Module]:
    """Layers that are met first on any way back from the outputs."""
    ahead, seen = [one.grad_fn for one in outputs], set()
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in made_by:
            yield made_by[node]
        else:
            ahead += [following for following, _ in node.next_functions]


def _attentions(
    log: list[nn.Module | _Mix], names: dict[nn.Module, str]
) -> tuple[frozenset[nn.Module], frozenset[int], tuple[Attention, ...]]:
    """Layers around attention, the widths outside of it, and those attentions whose heads are known."""
    calls: dict[tuple[nn.Module, int], list[int]] = {}
    for place, one in enumerate(log):
        if isinstance(one, _Mix):
            calls.setdefault((one.owner, one.began), []).append(place)
    mixing: set[nn.Module] = set()
    widths: set[int] = set()
    found: dict[str, Attention] = {}
    for (owner, began), places in calls.items():
        inputs = [one for one in log[began : places[0]] if isinstance(one, nn.Linear)]
        result = log[places[-1]]
        assert isinstance(result, _Mix)
        following = takewhile(lambda one: not isinstance(one, _Mix), log[places[-1] + 1 :])
        output = next((one for one in following if isinstance(one, nn.Linear)), None)
        mixing.update(inputs, [output] if output is not None else [])
        widths.update([one.in_features for one in inputs], [output.out_features] if output is not None else [])
        known = _known(owner, inputs, output, result.shape, names)
        if known is not None:
            found[known.output] = known
    return frozenset(mixing), frozenset(widths), tuple(found.values())


def _known(
    owner: nn.Module, inputs: list[nn.Linear], output: nn.Linear | None, shape: torch.Size, names: dict[nn.Module, str]
) -> Attention | None:
    """The attention as one whose heads can be cut; None where the projections are none of the two builds."""
    if output is None or len(shape) != 4 or output.in_features != shape[1] * shape[3]:
        return None
    num_heads, head_dim = shape[1], shape[3]
    widths = [one.out_features for one in inputs]
    whole = num_heads * head_dim
    if len(inputs) == 3 and widths[1] == widths[2] and widths[0] == whole:
        both = 2 * widths[1]
    elif len(inputs) == 1 and widths[0] > whole:
        both = widths[0] - whole
    else:
        return None
    num_groups, rest = divmod(both, 2 * head_dim)
    if rest or num_groups == 0 or num_heads % num_groups:
        return None
    paths = tuple(names[one] for one in inputs)
    return Attention(names[owner], paths, names[output], num_heads, num_groups, head_dim)
