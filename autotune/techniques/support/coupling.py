"""Blocks of two streams, ``y1 = x1 + f(x2)`` and ``y2 = x2 + g(y1)``, whose inputs are found again from their outputs.

Source: Gomez et al. 2017, arXiv:1707.04585.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from ...errors import PlanError, TaskError
from ...internals.fake_tensors import FakeTensor
from ...nested import tensors_in
from ..checkpointing import find_blocks
from .recomputed import Buffers

T = TypeVar("T")
_DECLARED = "_reversible_blocks"
"""On a model: the paths that its task names."""
_LARGEST_ERROR = 1e-3
"""Relative, of inputs that are found again, or twice the rounding of what is computed in, where that is more. Measured
on a CPU, of 12 and of 100 blocks as initialized: 2e-7 and 2e-6 in fp32; 0.002 and 0.009 with f and g in bfloat16, to
which numbers that differ by 1e-7 may be rounded otherwise."""
_SAME = 1e-5
"""Relative error of a block's own forward beside the same by parts, or twice the rounding where that is more: kernels
that add in no fixed order differ by less."""
_SAMPLE = 512
"""Numbers of each input that are kept to compare."""
_LEAVE_OUT = "Leave reversible out, or reversible_blocks in the task"


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

    def calls(self) -> tuple[_Call, _Call]:
        """One of each."""
        f, g = self._buffers
        return _Call(self._block.f, f), _Call(self._block.g, g)

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
        largest = max(_SAME, _rounding(x1, x2))
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
        return PlanError(f"settings.reversible.kind: {type(self._block).__name__} {why}. {_LEAVE_OUT}.")

    def _apart(self, x: Tensor, run: Callable[[], T]) -> T:
        """What a run returns that leaves random numbers and buffers as they are."""
        f, g = self._buffers
        with torch.enable_grad(), saved_tensors_hooks(_forget, _gone), f.spared(), g.spared(), _forked(x):
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
        with torch.enable_grad(), saved_tensors_hooks(_forget, _gone), self._first:
            found: Tensor = self._module(x.detach().requires_grad_())
        self._parameters = self._versions()
        return found.detach()

    def again(self, x: Tensor) -> Tensor:
        """Its result with a graph that begins at ``x``.

        Raises:
            RuntimeError: its parameters are others by now.
        """
        if self._parameters != self._versions():
            raise RuntimeError(
                "reversible: a parameter of f or g was changed in place or replaced after forward, and backward needs "
                "it as it was. Change parameters after backward, or leave reversible out of the plan."
            )
        devices, states = self._on_device
        with torch.enable_grad(), _forked(x), torch.autocast(**self._autocast), self._again:
            torch.set_rng_state(self._random)
            set_device_states(devices, states, device_type=x.device.type)
            return self._module(x)  # type: ignore[no-any-return]

    def _versions(self) -> list[tuple[int, int]]:
        return [(id(parameter), parameter._version) for parameter in self._module.parameters()]


def _forget(_: Any) -> Any:
    """In the place of what would be saved."""


def _gone(_: Any) -> Any:
    """
    Raises:
        RuntimeError: what was not saved is asked for.
    """
    raise RuntimeError(
        "reversible: backward came to a tensor that f or g computed and did not return (an auxiliary loss?), "
        "of which nothing is saved. Return it, detach it, or leave reversible out of the plan."
    )


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
        ctx.dtypes, ctx.largest_error = (x1.dtype, x2.dtype), max(_LARGEST_ERROR, _rounding(x1, x2))
        ctx.pair, ctx.sample = pair, _sample(x1, x2)
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
        ctx.pair.compare(ctx.sample, _sample(x1, x2), ctx.largest_error)
        if ctx.before is not None:
            ctx.before.put(x1, x2)
        return None, None, None, dx1, dx2, *df, *dg


def _back(
    call: _Call, given: Tensor, total: Tensor, gradient: Tensor | None, parameters: Sequence[nn.Parameter]
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
    pair.check(forward, *args)
    return _Coupled.apply(pair, _before(*args), len(of_f), *args, *of_f, *of_g)  # type: ignore[no-untyped-call]


def _before(x1: Tensor, x2: Tensor) -> _Kept | None:
    """What is kept of the block whose outputs these are; None where they are not just that,
    or no longer."""
    node = x1.grad_fn
    kept = getattr(node, "kept", None)
    is_row = node is x2.grad_fn and (x1.output_nr, x2.output_nr) == (0, 1)
    return kept if is_row and isinstance(kept, _Kept) and kept.is_as_given(x1, x2) else None


def _forked(x: Tensor) -> AbstractContextManager[Any]:
    """Random numbers that are drawn within, on the CPU and on the device of ``x``, are as if they had not been."""
    devices, _ = get_device_states(x)
    kind = x.device.type
    return torch.random.fork_rng(devices, device_type=kind if devices else "cuda")  # of no device, its name


def _rounding(*given: Tensor) -> float:
    """Twice the relative rounding of the coarsest that is computed in."""
    kind = given[0].device.type
    dtypes = [x.dtype for x in given]
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtypes.append(torch.get_autocast_dtype(kind))
    return max(2 * torch.finfo(dtype).eps for dtype in dtypes)


def _sample(*inputs: Tensor) -> Tensor:
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
