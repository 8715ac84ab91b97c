"""A dispatch mode that gives fake tensors device-specific results: which kernels the target takes, and values they
lack."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ...internals.fake_tensors import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from ...measure.profiling.parts import is_in_parts, parts_of
from ...measure.profiling.tracer import Sees
from .cuda_ops import attention_choice, cuda_ops
from .grad_accumulation import ADD, SCATTERS, Accumulation
from .known_values import dispatch, known_values
from .meta_fixes import correction_of
from .recurrent import RECURRENT_LAYER, reserve_bytes, workspace_bytes
from .sparse_ops import SPARSE, answer_of

Target = Literal["cpu", "cuda"]
"""The device that is planned for."""
_DEVICE = torch.ops.prim.device.default
_ITEM = torch.ops.aten._local_scalar_dense.default
_LIFT = torch.ops.aten.lift_fresh.default
_ATTENTION = torch.ops.aten._fused_sdp_choice.default
_GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default


def _overloads(**names: str) -> frozenset[Any]:
    """Of operations, by the names of their overloads."""
    return frozenset(getattr(getattr(torch.ops.aten, name), kind) for name in names for kind in names[name].split())


_IN_PLACE = _overloads(
    add_="Tensor Scalar", mul_="Tensor Scalar", div_="Tensor Scalar", lerp_="Scalar", addcmul_="default",
    addcdiv_="default",
)  # fmt: skip
"""In-place operations, which optimizers mostly use."""
_INTO = _overloads(add="out", mul="out")
"""Operations with an ``out`` argument."""
_WHOLE = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
_LIKE = _overloads(
    add="Tensor", clone="default", div="Tensor Scalar", mul="Tensor Scalar", neg="default", sqrt="default",
    sub="Tensor", zeros_like="default",
)  # fmt: skip
"""Operations whose result is like their arguments, where those are alike."""
_VIEWS = _overloads(
    _unsafe_view="default", as_strided="default", detach="default", expand="default", permute="default", select="int",
    slice="Tensor", squeeze="dim", t="default", transpose="int", unbind="int", unsqueeze="default", view="default",
)  # fmt: skip
"""Views. With the operations above they are most of a step's; torch's general fake implementation finds the same result
for each, in several times the time."""


def answers(
    target: Target, fakes: FakeTensorMode, is_optimizer: bool = False, sees: Sees | None = None
) -> AbstractContextManager[Any]:
    """A context in which one part of a step runs over fake tensors.

    Args:
        target: whose kernels are thought of.
        fakes: the mode that the tensors are of.
        is_optimizer: whether it is the optimizer's; one that steps within backward is noticed.
        sees: is shown each operation.
    """
    with ExitStack() as stack:
        stack.enter_context(known_values())
        steps = stack.enter_context(_Steps(is_optimizer))
        stack.enter_context(_Answers(target, fakes, steps, sees))
        if target == "cuda":
            stack.enter_context(cuda_ops())
        return stack.pop_all()


class _Steps:
    """Whether an optimizer steps: in its own part of a step, or within backward."""

    def __init__(self, is_running: bool) -> None:
        self.is_running = self._is_always = is_running

    def __enter__(self) -> Self:
        self._hooks = (
            register_optimizer_step_pre_hook(lambda *_: self._set(True)),
            register_optimizer_step_post_hook(lambda *_: self._set(self._is_always)),
        )
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _set(self, is_running: bool) -> None:
        self.is_running = is_running


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what fake tensors cannot: which attention kernel the target takes, by the shapes; and, in the optimizer,
    a value of 1 for whatever it reads (its number of steps, for bias correction).

    A step has thousands of operations, and each dispatch mode costs as much as the answer. So this is the only mode
    besides torch's own, to which it hands operations itself.
    """

    def __init__(self, target: Target, fakes: FakeTensorMode, steps: _Steps, sees: Sees | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._target = target
        self._fakes = fakes
        self._steps = steps
        self._sees = sees
        self._accumulation = Accumulation()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; torch would guard each operation against it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # asked several times for each node of a backward
            return args[0].device
        if is_in_parts(types):
            return NotImplemented
        kwargs = kwargs or {}
        if (parts := parts_of(func, args)) is not None:
            with self:
                return parts(*args, **kwargs)
        results = self._answer(func, types, args, kwargs)
        self._accumulation.note(results)
        if self._sees is not None:
            self._sees(func, args, kwargs, results)
        return results

    def _answer(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is _ITEM and self._steps.is_running:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is _LIFT and self._steps.is_running and _is_number(args[0]):  # of steps, say
            return self._kernel(torch.empty, args[0], (), dtype=args[0].dtype, device="meta")
        if func is _ATTENTION:
            if self._target == "cuda":
                return attention_choice(*args, **kwargs).value
            with unset_fake_temporarily():
                args, kwargs = tree_map_only(Tensor, _empty_like, (args, kwargs))
                return func(*args, **kwargs)
        if func in SPARSE:
            with self._fakes:
                answer = answer_of(func, args)
            if answer is not None:
                return answer
        if func is ADD and self._accumulation.is_in_place(args, kwargs):
            return args[0]
        if func in SCATTERS and self._accumulation.is_into_its_own(args):
            return args[0]
        if func in _IN_PLACE and _keeps_first(args, kwargs, self._steps.is_running):
            return args[0]
        if func in _INTO and _keeps_first(args, kwargs, takes_whole=True) and kwargs["out"].shape == args[0].shape:
            return kwargs["out"]
        if func in _LIKE and _keeps_first(args, kwargs) and _is_contiguous(args, kwargs):
            made = self._kernel(torch.empty, args[0], args[0].shape, dtype=args[0].dtype, device="meta")
            if made.stride() == args[0].stride():  # they tell of sides of 1, of which torch's general answer makes more
                return made
        if func in _VIEWS and isinstance(args[0], FakeTensor) and args[0].constant is None:
            return self._kernel(func, args[0], *args, **kwargs)
        if func is _GROUPED_PRODUCT:
            return self._grouped_product(*args, **kwargs)
        results = dispatch(self._fakes, func, types, args, kwargs)
        if results is NotImplemented:
            return func(*args, **kwargs)
        correct = correction_of(func, self._target)
        if correct is not None:
            with self._fakes:
                return correct(results, *args, **kwargs)
        if func is RECURRENT_LAYER and args[-1]:  # in training
            kept_bytes = (workspace_bytes if self._target == "cpu" else reserve_bytes)(args)
            with self._fakes:
                return (*results[:-1], torch.empty(kept_bytes, dtype=torch.uint8))
        return results

    def _kernel(self, func: Any, like: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The results of a kernel run on ``meta`` tensors, moved to the target's device type."""
        with in_kernel_invocation_manager(self._fakes):
            results = func(*args, **kwargs)
        if isinstance(results, Tensor):
            return FakeTensor(self._fakes, results, like.device)
        return [FakeTensor(self._fakes, one, like.device) for one in results]

    def _grouped_product(self, a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The grouped matrix product of experts' tokens and weights, in any precision: torch's fake implementation
        knows bfloat16 alone."""
        halves = (torch.empty_strided(x.size(), x.stride(), dtype=torch.bfloat16, device="meta") for x in (a, b))
        assert isinstance(a, FakeTensor)
        made = self._kernel(_GROUPED_PRODUCT, a, *halves, *args, **kwargs)
        return self._kernel(torch.empty_strided, a, made.size(), made.stride(), dtype=a.dtype, device="meta")


def _keeps_first(args: Any, kwargs: dict[str, Any], has_no_values: bool = False, takes_whole: bool = False) -> bool:
    """Whether an in-place operation surely returns its first argument: all tensors are of one type and device, and of
    its shape or broadcast to it; and none has a value that someone may ask for. Of whole numbers, where it takes them,
    all scalars are whole too."""
    first = args[0]
    if not isinstance(first, FakeTensor):
        return False
    is_real = first.dtype.is_floating_point
    if not is_real and not (takes_whole and first.dtype in _WHOLE):
        return False
    for one in (*args, *kwargs.values()):
        if isinstance(one, Tensor):
            if not isinstance(one, FakeTensor) or one.fake_device != first.fake_device:
                return False
            if one.constant is not None and not has_no_values:
                return False
            if one.dtype != first.dtype or one.layout != torch.strided or not _repeats(one.shape, first.shape):
                return False
        elif isinstance(one, complex) or (not is_real and isinstance(one, float)):
            return False
    return True


def _is_number(x: Any) -> bool:
    return type(x) is Tensor and not x.dim() and x.dtype.is_floating_point


def _repeats(shape: torch.Size, to: torch.Size) -> bool:
    """Whether a tensor of one shape is broadcast to another."""
    if shape == to:
        return True
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


def _is_contiguous(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the arguments are contiguous, and no other memory format is asked for."""
    return all(
        one.is_contiguous()
        if isinstance(one, Tensor)
        else one in (None, torch.preserve_format) or isinstance(one, (int, float))
        for one in (*args, *kwargs.values())
    )


def choose_as_on_cuda(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer that was not told an implementation take foreach, as it does on CUDA."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, requires_grad=x.requires_grad)


class SteadyScaler(torch.amp.GradScaler):
    """A loss scaler that takes all gradients for finite, without reading them."""

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Never skips."""
        return optimizer.step()

    def update(self, new_scale: Any = None) -> None:
        """The scale stays."""
        self._per_optimizer_states.clear()

    def get_scale(self) -> float:
        """A constant: that it has not fallen is all that is asked."""
        return 1.0
