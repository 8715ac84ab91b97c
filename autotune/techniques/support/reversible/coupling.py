"""Blocks of two streams, ``y1 = x1 + f(x2)`` and ``y2 = x2 + g(y1)``, whose inputs are found again from their outputs.

Source: Gomez et al. 2017, arXiv:1707.04585.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import PlanError
from .calls import Call
from .pair import LEAVE_OUT, Pair, rounding, sample

_LARGEST_ERROR = 1e-3
"""Relative, of inputs that are found again, or twice the rounding of what is computed in, where that is more. Measured
on a CPU, of 12 and of 100 blocks as initialized: 2e-7 and 2e-6 in fp32; 0.002 and 0.009 with f and g in bfloat16, to
which numbers that differ by 1e-7 may be rounded otherwise."""


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
            f"called with something else. {LEAVE_OUT}."
        )
    of_f, of_g = pair.parameters()
    if not (of_f or of_g or any(x.requires_grad for x in args)):
        return forward(*args)
    pair.check(forward, *args)
    return _Coupled.apply(pair, _before(*args), len(of_f), *args, *of_f, *of_g)  # type: ignore[no-untyped-call]


def _before(x1: Tensor, x2: Tensor) -> _Kept | None:
    """What is kept of the block whose outputs these are; None where they are not just that,
    or no longer."""
    node = x1.grad_fn
    kept = getattr(node, "kept", None)
    is_row = node is x2.grad_fn and (x1.output_nr, x2.output_nr) == (0, 1)
    return kept if is_row and isinstance(kept, _Kept) and kept.is_as_given(x1, x2) else None


class _Kept:
    """A block's outputs, until a block that takes them has run: in backward, that finds them again."""

    def __init__(self, *outputs: Tensor) -> None:
        self._outputs: tuple[Tensor, ...] = outputs
        self._versions = [y._version for y in outputs]

    def is_as_given(self, *outputs: Tensor) -> bool:
        """Whether the outputs, as a block takes them, are unchanged since."""
        return [y._version for y in outputs] == self._versions

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
        if not self.is_as_given(*outputs):
            raise RuntimeError(
                "reversible: an output of a block was changed in place, and backward needs it. Change a copy, or leave "
                "reversible out of the plan."
            )
        return outputs


class _Coupled(torch.autograd.Function):
    """One block. Its parameters are inputs, so that whoever waits for their gradients sees each once."""

    @staticmethod
    def forward(
        ctx: Any,
        pair: Pair,
        before: _Kept | None,
        num_of_f: int,
        x1: Tensor,
        x2: Tensor,
        *rest: Any,
    ) -> tuple[Tensor, Tensor]:
        f, g = calls = pair.calls()
        y1 = x1 + f.first(x2)
        y2 = x2 + g.first(y1)
        ctx.calls, ctx.before, ctx.kept = calls, before, _Kept(y1.detach(), y2.detach())
        ctx.dtypes, ctx.largest_error = (x1.dtype, x2.dtype), max(_LARGEST_ERROR, rounding(x1, x2))
        ctx.pair, ctx.sample = pair, sample(x1, x2)
        ctx.parameters = rest[:num_of_f], rest[num_of_f:]
        if before is not None:
            before.put()
        ctx.set_materialize_grads(False)
        return y1, y2

    @staticmethod
    def backward(ctx: Any, dy1: Tensor | None, dy2: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "reversible: gradients of gradients (create_graph) are not computed. Leave reversible out of the plan."
            )
        y1, y2 = ctx.kept.take()
        (f, g), (of_f, of_g) = ctx.calls, ctx.parameters
        x2, added, dg = _back(g, y1, y2, dy2, of_g)
        dx1, x2 = _sum(dy1, added), x2.to(ctx.dtypes[1])
        del y2, dy1, added
        x1, added, df = _back(f, x2, y1, dx1, of_f)
        dx2, x1 = _sum(dy2, added), x1.to(ctx.dtypes[0])
        ctx.pair.compare(ctx.sample, sample(x1, x2), ctx.largest_error)
        if ctx.before is not None:
            ctx.before.put(x1, x2)
        return None, None, None, dx1, dx2, *df, *dg


def _back(
    call: Call, given: Tensor, total: Tensor, gradient: Tensor | None, parameters: Sequence[nn.Parameter]
) -> tuple[Tensor, Tensor | None, Sequence[Tensor | None]]:
    """
    Args:
        call: made again.
        given: its input.
        total: its result and what that was added to.
        gradient: of the total; None where nobody asked for it.
        parameters: that train.

    Returns:
        What its result was added to; the gradients of its input and of the parameters.
    """
    leaf = given.detach().requires_grad_()
    result = call.again(leaf)
    other = total - result.detach()
    if gradient is None or not result.requires_grad:
        return other, None, [None] * len(parameters)
    inputs = (leaf, *parameters)
    with ExitStack() as stack:
        for parameter in parameters:
            stack.enter_context(_unwatched(parameter))
        own, *others = torch.autograd.grad(result, inputs, gradient.to(result.dtype), allow_unused=True)
    return other, own, others


@contextmanager
def _unwatched(parameter: nn.Parameter) -> Iterator[None]:
    """Without its hooks (``register_hook``): autograd calls them with what this backward returns of it."""
    hooks = parameter._backward_hooks or {}
    watched = dict(hooks)
    try:
        hooks.clear()
        yield
    finally:
        hooks.update(watched)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Of gradients that are there."""
    return other if one is None else one if other is None else one + other
