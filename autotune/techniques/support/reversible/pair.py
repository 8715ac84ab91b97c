"""Which blocks of a model are reversible, and whether one is: ``y1 = x1 + f(x2)`` and ``y2 = x2 + g(y1)``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ....errors import PlanError, TaskError
from ....internals.fake_tensors import FakeTensor
from ....nested import tensors_in
from ...checkpointing import find_blocks
from ..recomputed import Buffers
from .calls import Call, forget, forked, gone

T = TypeVar("T")
_DECLARED = "_reversible_blocks"
"""On a model: the paths that its task names."""
_SAME = 1e-5
"""Relative error of a block's own forward beside the same by parts, or twice the rounding where that is more: kernels
that add in no fixed order differ by less."""
_SAMPLE = 512
"""Numbers of each input that are kept to compare."""
LEAVE_OUT = "Leave reversible out, or reversible_blocks in the task"


def declare(model: nn.Module, paths: Sequence[str]) -> None:
    """Note on a model which blocks are reversible; copies of it have the note.

    Raises:
        TaskError: a path names no module, or one without ``f`` and ``g``.
    """
    reversible_blocks(model, paths, "reversible_blocks")
    vars(model)[_DECLARED] = tuple(paths)


def declared(model: nn.Module) -> Sequence[str]:
    """The paths of a model's blocks that are said to be reversible."""
    paths: Sequence[str] = vars(model).get(_DECLARED, ())
    return paths


def reversible_blocks(model: nn.Module, paths: Sequence[str], name: str) -> list[nn.Module]:
    """
    Args:
        model: whose blocks they are.
        paths: of blocks, or of containers of them.
        name: what the user calls the paths.

    Raises:
        TaskError: a path names no module, or one without ``f`` and ``g``.
    """
    blocks = find_blocks(model, paths, name)
    for block in blocks:
        if not all(isinstance(getattr(block, part, None), nn.Module) for part in ("f", "g")):
            raise TaskError(
                f"{name}: a reversible block has modules f and g, but {type(block).__name__} has not both. "
                "It takes (x1, x2) and returns (x1 + f(x2), x2 + g(y1))."
            )
    return blocks


class Pair:
    """``f`` and ``g`` of a block."""

    def __init__(self, block: nn.Module) -> None:
        parts: Any = block
        self._block, self._buffers = parts, (Buffers(parts.f), Buffers(parts.g))
        self._checked: set[bool] = set()
        """What its ``training`` was when it was checked."""
        self._worst: Tensor | None = None
        """On a device: the largest relative error of inputs that were found again, by the largest allowed."""
        self._seen: Tensor | None = None
        """The same on the host, as far as the device has come."""

    def calls(self) -> tuple[Call, Call]:
        """One of each."""
        f, g = self._buffers
        return Call(self._block.f, f), Call(self._block.g, g)

    def parameters(self) -> list[list[nn.Parameter]]:
        """Of each, those that train."""
        return [[one for one in part.parameters() if one.requires_grad] for part in (self._block.f, self._block.g)]

    def check(self, forward: Callable[..., Any], x1: Tensor, x2: Tensor) -> None:
        """Run the block's first call on numbers, in training and in evaluation, through its own forward too.

        Raises:
            PlanError: that gives others, or has gradients that this would not have.
        """
        is_training = self._block.training
        if is_training in self._checked or isinstance(x1, FakeTensor):
            return
        known = {*self._block.f.parameters(), *self._block.g.parameters()}
        if strays := [name for name, one in self._block.named_parameters() if one not in known]:
            raise self._refusal(f"has parameters that are neither its f's nor its g's ({', '.join(strays)})")

        given = [x.detach().requires_grad_() for x in (x1, x2)]
        found = self._apart(x1, lambda: forward(*given))
        leaves = set(_leaves(found if isinstance(found, tuple) else ()))
        holders = [type(module).__name__ for module in self._block.modules() if _holds(module, given)]
        found = [y.detach() if isinstance(y, Tensor) else y for y in found] if isinstance(found, tuple) else [found]
        ours = [y.detach() for y in self._apart(x1, lambda: self._by_parts(*given))]
        largest = max(_SAME, rounding(x1, x2))
        if len(found) != 2 or not all(_same(one, other, largest) for one, other in zip(found, ours, strict=True)):
            raise self._refusal("was to return (x1 + f(x2), x2 + g(y1)), but returned something else")
        if not leaves <= {*given, *known}:
            raise self._refusal(
                "reads a tensor with a gradient that is no parameter of its f and g, and would get none"
            )
        if holders:
            raise self._refusal(
                f"computes a tensor on the way that {holders[0]} holds (an auxiliary loss?), and whose gradient would "
                "be lost. Return what has a gradient, or detach it"
            )
        self._checked.add(is_training)

    def compare(self, were: Tensor, found: Tensor, largest: float) -> None:
        """Samples of the inputs that were found again, with what they were. Of a device nothing is waited for: what was
        too far off there is told by a later call, when the device has come so far.

        Raises:
            PlanError: they differ by more than the largest error, relative.
        """
        if isinstance(were, FakeTensor):
            return
        error = _error(found, were) / largest
        if error.device.type != "cpu":
            self._worst = error if self._worst is None else torch.maximum(self._worst, error)
            if self._seen is None:
                self._seen = torch.zeros((), pin_memory=True)
            error = self._seen.copy_(self._worst, non_blocking=True)
        if not (times := float(error)) <= 1:
            raise PlanError(
                f"settings.reversible.kind: inputs of a {type(self._block).__name__} were to be found again within "
                f"{largest:.2g} (relative), but are {times * largest:.2g} off: rounding grows through the blocks, or f "
                "or g computes something else each time. Keep x1 and x2 in fp32, name fewer blocks, or leave "
                "reversible out."
            )

    def _by_parts(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        y1 = self._added(x1, "f", x2)
        return y1, self._added(x2, "g", y1)

    def _added(self, total: Tensor, name: str, given: Tensor) -> Tensor:
        found = getattr(self._block, name)(given)
        if not isinstance(found, Tensor) or found.shape != total.shape:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise self._refusal(f"adds what {name} returns to {tuple(total.shape)}, but that is {shape}")
        return total + found

    def _refusal(self, why: str) -> PlanError:
        return PlanError(f"settings.reversible.kind: {type(self._block).__name__} {why}. {LEAVE_OUT}.")

    def _apart(self, x: Tensor, run: Callable[[], T]) -> T:
        """What a run returns that leaves random numbers and buffers as they are."""
        f, g = self._buffers
        with torch.enable_grad(), saved_tensors_hooks(forget, gone), f.spared(), g.spared(), forked(x):
            return run()


def rounding(*given: Tensor) -> float:
    """Twice the relative rounding of the coarsest that is computed in."""
    kind = given[0].device.type
    dtypes = [x.dtype for x in given]
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtypes.append(torch.get_autocast_dtype(kind))
    return max(2 * torch.finfo(dtype).eps for dtype in dtypes)


def sample(*inputs: Tensor) -> Tensor:
    """Some numbers of each, an odd number of places apart, so that they are not all of one feature."""
    places = [torch.arange(0, x.numel(), x.numel() // _SAMPLE | 1, device=x.device) for x in inputs]
    return torch.cat([x.detach().take(which).float() for x, which in zip(inputs, places, strict=True)])


def _error(found: Tensor, were: Tensor) -> Tensor:
    """Relative; 0 where they were not finite or all 0."""
    differ, size = (found - were).float().norm(), were.float().norm()
    return torch.where(size.isfinite() & (size > 0), differ / size, 0.0)


def _same(one: Any, other: Tensor, largest: float) -> bool:
    """But for rounding."""
    is_alike = isinstance(one, Tensor) and (one.shape, one.dtype) == (other.shape, other.dtype)
    return is_alike and bool(_error(one, other) <= largest)


def _holds(module: nn.Module, given: Sequence[Tensor]) -> bool:
    """Whether it has a tensor whose gradient would go on to what the block was given."""
    held = [one for one in tensors_in(list(vars(module).values())) if one.grad_fn is not None]
    return any(leaf is x for leaf in _leaves(held) for x in given)


def _leaves(outputs: Sequence[Any]) -> Iterator[Tensor]:
    """What gradients of these would be accumulated in."""
    waiting: list[Any] = [y.grad_fn for y in outputs if isinstance(y, Tensor)]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                yield node.variable
            waiting += [following for following, _ in node.next_functions]
