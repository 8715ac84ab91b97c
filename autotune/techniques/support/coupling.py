"""Blocks of two streams, ``y1 = x1 + f(x2)`` and ``y2 = x2 + g(y1)``, whose inputs are found again from their outputs.

Source: Gomez et al. 2017, arXiv:1707.04585.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from ...errors import PlanError, TaskError
from ...internals.fake_tensors import FakeTensor
from .recomputed import Buffers

T = TypeVar("T")
_DECLARED = "_is_reversible"
"""On blocks that a task says are reversible."""
_LARGEST_ERROR = 1e-3
"""Relative, of inputs that are found again, or twice the rounding of what is computed in, where that is more. Measured
on a CPU, of 12 and of 100 blocks as initialized: 2e-7 and 2e-6 in fp32; 0.002 and 0.009 with f and g in bfloat16, to
which numbers that differ by 1e-7 may be rounded otherwise."""
_SAMPLE = 1024
"""Numbers of an input that are kept in the first step, to compare."""
_LEAVE_OUT = "Leave reversible out, or reversible_blocks in the task"


def declare(blocks: Sequence[nn.Module]) -> None:
    """Note on blocks that they are reversible; copies of them have the note.

    Raises:
        TaskError: one has no modules ``f`` and ``g``.
    """
    for block in blocks:
        if not all(isinstance(getattr(block, name, None), nn.Module) for name in ("f", "g")):
            raise TaskError(
                f"reversible_blocks: a reversible block has modules f and g, but {type(block).__name__} has not both. "
                "It takes (x1, x2) and returns (x1 + f(x2), x2 + g(y1))."
            )
        vars(block)[_DECLARED] = True


def declared(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model that are said to be reversible."""
    return [module for module in model.modules() if vars(module).get(_DECLARED)]


class Pair:
    """``f`` and ``g`` of a block."""

    def __init__(self, block: nn.Module) -> None:
        parts: Any = block
        self._block, self._buffers = parts, (Buffers(parts.f), Buffers(parts.g))
        self._is_checked = False

    def calls(self) -> tuple[_Call, _Call]:
        """One of each."""
        f, g = self._buffers
        return _Call(self._block.f, f), _Call(self._block.g, g)

    def parameters(self) -> list[list[nn.Parameter]]:
        """Of each, those that train."""
        return [[one for one in part.parameters() if one.requires_grad] for part in (self._block.f, self._block.g)]

    def check(self, forward: Callable[..., Any], x1: Tensor, x2: Tensor) -> bool:
        """Whether this is the block's first call on numbers, which are then run through its own forward, too.

        Raises:
            PlanError: that gives others, or has gradients that this would not have.
        """
        if self._is_checked or isinstance(x1, FakeTensor):
            return False

        def coupled(x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
            y1 = x1 + self._block.f(x2)
            return y1, x2 + self._block.g(y1)

        given = [x.detach().requires_grad_() for x in (x1, x2)]
        found = self._apart(x1, lambda: forward(*given))
        known = {*given, *self._block.f.parameters(), *self._block.g.parameters()}
        stray = isinstance(found, tuple) and any(leaf not in known for leaf in _leaves(found))
        found = [y.detach() if isinstance(y, Tensor) else y for y in found] if isinstance(found, tuple) else [found]
        ours = [y.detach() for y in self._apart(x1, lambda: coupled(*given))]
        if len(found) != 2 or not all(map(_same, found, ours)) or [y.shape for y in ours] != [x1.shape, x2.shape]:
            raise PlanError(
                f"settings.reversible.kind: {type(self._block).__name__} was to return (x1 + f(x2), x2 + g(y1)) of its "
                f"shapes, but returned something else. {_LEAVE_OUT}."
            )
        if stray:
            raise PlanError(
                f"settings.reversible.kind: {type(self._block).__name__} reads a tensor with a gradient that is no "
                f"parameter of its f and g, and would get none. {_LEAVE_OUT}."
            )
        self._is_checked = True
        return True

    def _apart(self, x: Tensor, run: Callable[[], T]) -> T:
        """What a run returns that leaves random numbers and buffers as they are."""
        f, g = self._buffers
        with torch.enable_grad(), saved_tensors_hooks(_forget, _forget), f.spared(), g.spared(), _forked(x):
            return run()


class _Call:
    """A call that is made again: with the random numbers, the autocast and the buffers that it had."""

    def __init__(self, module: nn.Module, buffers: Buffers) -> None:
        self._module = module
        self._first, self._again = buffers.contexts()

    def first(self, x: Tensor) -> Tensor:
        """Its result without a graph. Gradients are on, since layers may compute another way without; nothing is
        saved."""
        self._random, self._on_device = torch.get_rng_state(), get_device_states(x)
        kind = x.device.type
        self._autocast: dict[str, Any] = {"device_type": kind, "enabled": False}
        if torch.amp.is_autocast_available(kind):
            self._autocast |= {
                "enabled": torch.is_autocast_enabled(kind),
                "dtype": torch.get_autocast_dtype(kind),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
        with torch.enable_grad(), saved_tensors_hooks(_forget, _forget), self._first:
            found: Tensor = self._module(x.detach().requires_grad_())
        return found.detach()

    def largest_error(self, *given: Tensor) -> float:
        """That inputs which are found again may have, relative."""
        kinds = [x.dtype for x in given] + ([self._autocast["dtype"]] if self._autocast["enabled"] else [])
        return max(_LARGEST_ERROR, *(2 * torch.finfo(kind).eps for kind in kinds))

    def again(self, x: Tensor) -> Tensor:
        """Its result with a graph that begins at ``x``."""
        devices, states = self._on_device
        with torch.enable_grad(), _forked(x), torch.autocast(**self._autocast), self._again:
            torch.set_rng_state(self._random)
            set_device_states(devices, states, device_type=x.device.type)
            return self._module(x)  # type: ignore[no-any-return]


def _forget(_: Any) -> Any:
    """In the place of what would be saved."""


class _Kept:
    """A block's outputs, until a block that takes them has run: in backward, that finds them again."""

    def __init__(self, *outputs: Tensor) -> None:
        self._outputs: tuple[Tensor, ...] = outputs
        self._versions = [y._version for y in outputs]

    def put(self, *outputs: Tensor) -> None:
        """Let go of them (with none), or keep what was found again."""
        self._outputs, self._versions = outputs, [y._version for y in outputs]

    def take(self) -> tuple[Tensor, ...]:
        """
        Raises:
            RuntimeError: they are not there, or were changed.
        """
        outputs, self._outputs = self._outputs, ()
        if not outputs:
            raise RuntimeError(
                "reversible: a block's outputs are not kept: backward came to it a second time (retain_graph), or not "
                "through the reversible block that took them. Leave reversible out of the plan."
            )
        if [y._version for y in outputs] != self._versions:
            raise RuntimeError("reversible: an output of a block was changed in place, and backward needs it.")
        return outputs


class _Coupled(torch.autograd.Function):
    """One block. Its parameters are inputs, so that whoever waits for their gradients sees each once."""

    @staticmethod
    def forward(
        ctx: Any,
        calls: tuple[_Call, _Call],
        before: _Kept | None,
        compares: bool,
        num_of_f: int,
        x1: Tensor,
        x2: Tensor,
        *rest: Any,
    ) -> tuple[Tensor, Tensor]:
        f, g = calls
        y1 = x1 + f.first(x2)
        y2 = x2 + g.first(y1)
        ctx.calls, ctx.before, ctx.kept = calls, before, _Kept(y1.detach(), y2.detach())
        ctx.dtypes, ctx.largest_error = (x1.dtype, x2.dtype), f.largest_error(x1, x2)
        ctx.sample = _sample(x1, x2) if compares else None
        ctx.parameters = rest[:num_of_f], rest[num_of_f:]
        if before is not None:
            before.put()
        return y1, y2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy1: Tensor, dy2: Tensor) -> tuple[Any, ...]:
        y1, y2 = ctx.kept.take()
        (f, g), (of_f, of_g) = ctx.calls, ctx.parameters
        x2, added, dg = _back(g, y1, y2, dy2, of_g)
        dx1, x2 = dy1 + added, x2.to(ctx.dtypes[1])
        del y2, dy1, added
        x1, added, df = _back(f, x2, y1, dx1, of_f)
        dx2, x1 = dy2 + added, x1.to(ctx.dtypes[0])
        if ctx.sample is not None:
            _check_found(ctx.sample, _sample(x1, x2), ctx.largest_error)
        if ctx.before is not None:
            ctx.before.put(x1, x2)
        return None, None, None, None, dx1, dx2, *df, *dg


def _back(
    call: _Call, given: Tensor, total: Tensor, gradient: Tensor, parameters: Sequence[nn.Parameter]
) -> tuple[Tensor, Any, Sequence[Tensor | None]]:
    """
    Args:
        call: made again.
        given: its input.
        total: its result and what that was added to.
        gradient: of the total.
        parameters: that train.

    Returns:
        What its result was added to; the gradients of its input and of the parameters.
    """
    leaf = given.detach().requires_grad_()
    result = call.again(leaf)
    other = total - result.detach()
    if not result.requires_grad:
        return other, 0.0, [None] * len(parameters)
    inputs = (leaf, *parameters)
    own, *others = torch.autograd.grad(result, inputs, gradient.to(result.dtype), allow_unused=True)
    return other, 0.0 if own is None else own, others


def coupled(forward: Callable[..., Any], pair: Pair, /, *args: Any, **kwargs: Any) -> Any:
    """What a reversible block's forward returns, of which nothing is saved but the outputs of the last in a row.

    Args:
        forward: its own.
        pair: its ``f`` and ``g``.
        args: x1, x2.
        kwargs: none.

    Raises:
        PlanError: it is given something else, or is not reversible.
    """
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if kwargs or len(args) != 2 or not all(isinstance(x, Tensor) and x.is_floating_point() for x in args):
        raise PlanError(
            "settings.reversible.kind: a reversible block is called with two tensors, block(x1, x2), but one was "
            f"called with something else. {_LEAVE_OUT}."
        )
    of_f, of_g = pair.parameters()
    if not (of_f or of_g or any(x.requires_grad for x in args)):
        return forward(*args)
    compares = pair.check(forward, *args)
    return _Coupled.apply(pair.calls(), _before(*args), compares, len(of_f), *args, *of_f, *of_g)  # type: ignore[no-untyped-call]


def _before(x1: Tensor, x2: Tensor) -> _Kept | None:
    """What is kept of the block whose outputs these are; None where they are not just that."""
    node = x1.grad_fn
    kept = getattr(node, "kept", None)
    is_row = node is x2.grad_fn and (x1.output_nr, x2.output_nr) == (0, 1)
    return kept if is_row and isinstance(kept, _Kept) else None


def _forked(x: Tensor) -> AbstractContextManager[Any]:
    """Random numbers that are drawn within, on the CPU and on the device of ``x``, are as if they had not been."""
    devices, _ = get_device_states(x)
    kind = x.device.type
    return torch.random.fork_rng(devices, device_type=kind if devices else "cuda")  # of no device, its name


def _sample(*inputs: Tensor) -> list[Tensor]:
    return [x.detach().reshape(-1)[:: max(1, x.numel() // _SAMPLE)].clone() for x in inputs]


def _check_found(were: Sequence[Tensor], found: Sequence[Tensor], largest: float) -> None:
    """
    Raises:
        PlanError: the inputs that were found again differ by more than the largest error, relative.
    """
    differ, size = (sum(float(x.double().square().sum()) for x in every) for every in (_minus(found, were), were))
    error = (differ / size) ** 0.5 if size else 0.0
    if math.isfinite(size) and not error <= largest:
        raise PlanError(
            f"settings.reversible.kind: inputs of blocks were to be found again within {largest:.2g} (relative), but "
            f"are {error:.2g} off: rounding grows through the blocks. Keep x1 and x2 in fp32, name fewer blocks, or "
            "leave reversible out."
        )


def _minus(some: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    return [one.double() - other.double() for one, other in zip(some, others, strict=True)]


def _same(one: Any, other: Tensor) -> bool:
    """To the bit."""
    is_alike = isinstance(one, Tensor) and (one.shape, one.dtype) == (other.shape, other.dtype)
    return is_alike and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


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
