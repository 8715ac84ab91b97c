"""``FrozenWeight``: a parameter that does not train, kept as codes; whoever reads it gets its numbers, made anew."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ....errors import PlanError
from ..elsewhere import Elsewhere
from .weight_codes import FLOATS, Form


class FrozenWeight(Elsewhere):
    """A parameter of the shape and dtype that it had, whose numbers are made anew for each operation that reads them.

    Linear layers and embeddings keep only codes for backward. What takes the place of its numbers is rounded again; an
    update of them, which rounding would lose a part of, and a write into a view of it raise a PlanError.
    """

    _no_memory: ClassVar[str] = (
        "settings: the memory of a weight of {shape} is asked for, which holds codes and no numbers. "
        "Use kind: none, or read the weight by torch's operations."
    )
    _codes: Tensor
    _form: Form

    @staticmethod
    def __new__(cls: type[FrozenWeight], codes: Tensor, form: Form) -> FrozenWeight:
        """
        Args:
            codes: (bytes,) of uint8: codes and scales.
            form: what they are of.
        """
        made: FrozenWeight = Tensor._make_wrapper_subclass(cls, form.shape, dtype=form.dtype, device=codes.device)
        made._codes, made._form = codes, form
        return made

    @classmethod
    def of(cls, weight: Tensor, kind: str) -> FrozenWeight:
        """A parameter's numbers as codes, with what hangs on it."""
        form = Form(kind, weight.shape, weight.dtype)
        codes = torch.empty(form.num_bytes, dtype=torch.uint8, device=weight.device)
        form.encode(weight, codes)
        made: FrozenWeight = _parameter(codes, form)
        vars(made).update(vars(weight))
        return made

    def numbers(self) -> Tensor:
        """All of them, made anew."""
        return self._form.decode(self._codes)

    def _write(self, numbers: Tensor) -> None:
        """Keep other numbers.

        Raises:
            PlanError: they are of another shape.
        """
        if numbers.shape != self.shape:
            raise PlanError(
                f"settings: a weight of {tuple(self.shape)} is kept as codes, and numbers of "
                f"{tuple(numbers.shape)} were to take its place. Use kind: none."
            )
        self._form.encode(numbers, self._codes)

    def _take(self, numbers: Tensor, is_update: bool) -> None:
        """Keep what an operation in place has made.

        Raises:
            PlanError: it has changed what was there by what was there, as a moving average does.
        """
        if not is_update:
            self._write(numbers)
        elif not torch.equal(numbers, self.numbers()):
            raise PlanError(
                f"settings: a weight of {tuple(self.shape)} does not train and is kept as codes, but it "
                "is updated in place, as by a moving average: rounding would lose small updates. Use kind: none."
            )

    def untyped_storage(self) -> torch.UntypedStorage:
        """Where the codes lie."""
        return self._codes.untyped_storage()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FrozenWeight({tuple(self.shape)}, {self.dtype}, {self._form.kind})"

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenWeight:
        if id(self) not in memo:
            rest = copy.deepcopy(vars(self), memo)
            memo[id(self)] = _rebuilt(rest)
        found: FrozenWeight = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (vars(self),)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = _ANSWERS.get(func)
        if answer is not None:
            return answer(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch.inference_mode(False):
            return cls._dispatched(func, args, kwargs or {})

    @classmethod
    def _dispatched(cls, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _SAME:
            return FrozenWeight(args[0]._codes, args[0]._form)
        if func is torch.ops.aten.clone.default:
            return FrozenWeight(args[0]._codes.clone(), args[0]._form)
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype", args[0].dtype) in FLOATS:
            form = Form(args[0]._form.kind, args[0].shape, kwargs.get("dtype", args[0].dtype))
            return FrozenWeight(args[0]._codes.to(kwargs.get("device"), copy=True), form)
        ours = {id(one): one for one in tree_leaves((args, kwargs)) if isinstance(one, FrozenWeight)}
        numbers = {key: one.numbers() for key, one in ours.items()}
        read = lambda one: numbers[id(one)] if isinstance(one, FrozenWeight) else one  # noqa: E731
        result = func(*tree_map(read, args), **tree_map(read, kwargs))
        if not func._schema.is_mutable:
            is_view = any(one.alias_info is not None for one in func._schema.returns)
            return tree_map(_as_view, result) if is_view else result
        written = chain(zip(func._schema.arguments, args, strict=False), _named(func, kwargs))
        changed = [leaf for argument, value in written if _is_written(argument) for leaf in tree_leaves(value)]
        for one in (leaf for leaf in changed if isinstance(leaf, FrozenWeight)):
            one._take(numbers[id(one)], is_update=func._schema.name not in _ANEW)
        back = {id(number): ours[key] for key, number in numbers.items()}
        return tree_map(lambda one: back.get(id(one), one), result)


class _View(Tensor):
    """A view of numbers that were made for it: to be read."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if (writes and isinstance(args[0], _View)) or isinstance(kwargs.get("out"), _View):
            raise PlanError(
                "settings: a part of a weight that is kept as codes is written to, which would be lost. "
                "Write to the weight itself (weight[3] = 0), or use kind: none."
            )
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
        return tree_map(_as_view, found) if name in _VIEWS else found


def _as_view(value: Any) -> Any:
    is_plain = isinstance(value, Tensor) and not isinstance(value, FrozenWeight)
    return value.as_subclass(_View) if is_plain else value


_VIEWS = ("__getitem__", "view", "reshape", "t", "transpose", "select", "narrow", "flatten", "detach", "unsqueeze")
"""Functions that give views of a view."""
_ANEW = tuple(
    f"aten::{name}_"
    for name in ("copy", "fill", "zero", "normal", "uniform", "bernoulli", "exponential", "random", "log_normal")
)
"""What writes numbers whatever was there."""
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def _named(func: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    return ((one, kwargs[one.name]) for one in func._schema.arguments if one.name in kwargs)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _parameter(codes: Tensor, form: Form) -> Any:
    return nn.Parameter(FrozenWeight(codes, form), requires_grad=False)


def _rebuilt(rest: dict[str, Any]) -> FrozenWeight:
    made = FrozenWeight(rest["_codes"], rest["_form"])
    vars(made).update(rest)
    return made


class _Product(torch.autograd.Function):
    """``x @ weight.t() + bias``, for which backward has codes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, codes: Tensor, bias: Tensor | None, form: Form, is_transposed: bool) -> Tensor:
        weight = form.decode(codes, _dtype_of(x, form))
        return F.linear(x, weight.t() if is_transposed else weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, codes, bias, ctx.form, ctx.is_transposed = inputs
        ctx.dtype, ctx.dtypes = output.dtype, (x.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(codes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (codes,), grad_x, grad_bias = ctx.saved_tensors, None, None
        if ctx.needs_input_grad[0]:
            weight = ctx.form.decode(codes, ctx.dtype)
            grad_x = (grad @ (weight.t() if ctx.is_transposed else weight)).to(ctx.dtypes[0])
        if ctx.needs_input_grad[2]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.dtypes[1])
        return grad_x, None, grad_bias, None, None


def _dtype_of(x: Tensor, form: Form) -> torch.dtype:
    """What a product with the weight is computed in: autocast's dtype, or the weight's own."""
    kind = x.device.type
    is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_cast and x.dtype != torch.float64 else form.dtype


def _linear(input: Any, weight: Any, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, FrozenWeight) or isinstance(input, FrozenWeight):
        return F.linear(*_full(input, weight, bias))
    return _product(input, weight, bias, is_transposed=False)


def _addmm(input: Any, mat1: Any, mat2: Any, **rest: Any) -> Tensor:
    """As transformers' Conv1D calls it."""
    if rest or not isinstance(mat2, FrozenWeight) or isinstance(mat1, FrozenWeight) or input.dim() != 1:
        return torch.addmm(*_full(input, mat1, mat2), **rest)
    return _product(mat1, mat2, input, is_transposed=True)


def _product(x: Tensor, weight: FrozenWeight, bias: Tensor | None, is_transposed: bool) -> Tensor:
    found: Tensor = _Product.apply(x, weight._codes, bias, weight._form, is_transposed)  # type: ignore[no-untyped-call]
    return found


def _embedding(input: Tensor, weight: Any, max_norm: float | None = None, **rest: Any) -> Tensor:
    """Torch names all but the first two."""
    if max_norm is not None:
        return F.embedding(input, weight.numbers(), max_norm=max_norm, **rest)
    return weight._form.rows(weight._codes, input)  # type: ignore[no-any-return]


def _full(*values: Any) -> list[Any]:
    return [one.numbers() if isinstance(one, FrozenWeight) else one for one in values]


def _refuse_gradient(weight: Tensor, wanted: bool = True) -> Tensor:
    """
    Raises:
        PlanError: a gradient is asked for, which codes cannot follow.
    """
    if wanted:
        raise PlanError(
            f"settings: a weight of {tuple(weight.shape)} is kept as codes, and its gradient is asked for now. "
            "With frozen_weights, set requires_grad before the plan is applied, or apply a plan without them first: "
            "the weights are stored in full again, with the values that the codes stand for."
        )
    return weight


def _refuse_grad(weight: Tensor, grad: Tensor | None) -> None:
    _refuse_gradient(weight, grad is not None)


def _set_data(weight: Any, value: Tensor) -> None:
    """What ``.data =`` does: with codes, take them over; with numbers, keep them as codes."""
    if value.dtype not in FLOATS:
        raise PlanError(
            f"settings: a weight of {tuple(weight.shape)} is kept as codes, and numbers of "
            f"{value.dtype} were to take its place. Use one of {', '.join(map(str, FLOATS))}, or kind: none."
        )
    if not isinstance(value, FrozenWeight):
        weight._write(value.to(weight.device))
        return
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.data.__set__(weight, value)  # type: ignore[attr-defined]
    weight._codes, weight._form = value._codes, value._form


def _set_item(weight: Any, place: Any, value: Any) -> None:
    numbers, (value,) = weight.numbers(), _full(value)
    numbers[place] = value
    weight._write(numbers)


_ANSWERS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    F.embedding: _embedding,
    Tensor.requires_grad_: lambda weight, requires_grad=True: _refuse_gradient(weight, requires_grad),
    Tensor.requires_grad.__set__: _refuse_gradient,  # type: ignore[attr-defined]
    Tensor.grad.__set__: _refuse_grad,  # type: ignore[union-attr]
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.__setitem__: _set_item,
}
"""What is answered here; all else is done by torch, with the numbers."""
