"""``FrozenWeight``: a parameter that does not train, kept as codes; whoever reads it gets its numbers, made anew."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ...errors import PlanError
from .few_bits import Codes, Codes4, Fields, Store

STORES: Mapping[str, Store] = {"8bit": Codes(), "4bit": Codes4()}
"""By the kind of ``frozen_weights``."""
_LEAST_PIECE, _NUM_PIECES = 2**16, 16
"""Numbers that are made at once beside the result, at least, and about how many pieces a large weight comes to. Powers
of 2, so that whole blocks are in each."""
_NEAREST = 0.5
"""The noise that rounds to the nearest."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Form:
    """What the codes of a weight are of."""

    kind: str
    """Of store."""
    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of codes and scales."""
        return self._layout[-1][2]

    @cached_property
    def _layout(self) -> tuple[tuple[str, int, int, torch.dtype], ...]:
        """Of the parts in one piece of memory: names, where they start and end, and their dtypes."""
        parts = STORES[self.kind].empty(torch.empty(self.shape, device="meta"))
        found, start = [], 0
        for name, part in parts.items():
            found.append((name, start, start + part.nbytes, part.dtype))
            start += part.nbytes
        return tuple(found)

    def fields(self, codes: Tensor) -> Fields:
        """What the store calls the parts of one piece of memory.

        Args:
            codes: (bytes,) of uint8.
        """
        return {name: codes[start:end].view(dtype) for name, start, end, dtype in self._layout}

    def encode(self, values: Tensor, codes: Tensor) -> None:
        """Write numbers as codes.

        Args:
            values: of any shape with as many numbers.
            codes: (bytes,) of uint8, to write to.
        """
        fields, flat, store = self.fields(codes), values.detach().reshape(-1), STORES[self.kind]
        for start, end in self._pieces():
            numbers = flat[start:end].float()
            store.write(fields, start, numbers, True, torch.full_like(numbers, _NEAREST))

    def decode(self, codes: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """All numbers, a piece at a time, in the weight's dtype or another."""
        made = torch.empty(self.shape, dtype=dtype or self.dtype, device=codes.device)
        fields, flat, store = self.fields(codes), made.view(-1), STORES[self.kind]
        for start, end in self._pieces():
            flat[start:end] = store.read(fields, start, end, True)
        return made

    def rows(self, codes: Tensor, numbers: Tensor) -> Tensor:
        """Some rows, without the others: of the blocks in which they lie.

        Args:
            codes: (bytes,) of uint8.
            numbers: (…) of rows.

        Returns:
            (…, features), in the weight's dtype.
        """
        fields, features = self.fields(codes), self.shape[1]
        num_blocks, block = fields["scales"].numel(), STORES[self.kind].block
        starts = numbers.reshape(-1).long() * features
        per_row = 1 if block % features == 0 else -(-features // block) + (features % block != 0)
        places = (starts // block)[:, None] + torch.arange(per_row, device=codes.device)
        places = places.clamp_(max=num_blocks - 1).view(-1)
        taken = {name: one.view(num_blocks, -1)[places].view(-1) for name, one in fields.items()}
        found = STORES[self.kind].read(taken, 0, places.numel() * block, True).view(-1, per_row * block)
        if features % block:
            found = found.gather(1, (starts % block)[:, None] + torch.arange(features, device=codes.device))
        return found.to(self.dtype).view(*numbers.shape, features)

    def _pieces(self) -> Iterator[tuple[int, int]]:
        length = self.shape.numel()
        step = max(_LEAST_PIECE, 2 ** (length // _NUM_PIECES).bit_length())
        return ((start, min(start + step, length)) for start in range(0, length, step))


class FrozenWeight(Tensor):
    """A parameter of the shape and dtype that it had, whose numbers are made anew for each operation that reads them.

    Linear layers and embeddings keep only codes for backward. What is written into it is rounded again; what is written
    into a view of it is lost.
    """

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

    def full(self) -> nn.Parameter:
        """A parameter in full, with what hangs on this one."""
        made = nn.Parameter(self._form.decode(self._codes), requires_grad=False)
        own = vars(_parameter(self._codes, self._form))
        vars(made).update({name: value for name, value in vars(self).items() if name not in own})
        return made

    def _write(self, numbers: Tensor) -> None:
        """Keep other numbers.

        Raises:
            PlanError: they are of another shape.
        """
        if numbers.shape != self.shape:
            raise PlanError(
                f"settings.frozen_weights: a weight of {tuple(self.shape)} is kept as codes, and numbers of "
                f"{tuple(numbers.shape)} were to take its place. Use kind: none."
            )
        self._form.encode(numbers, self._codes)

    def numpy(self, *, force: bool = False) -> Any:
        """Its numbers; what is written to them is lost."""
        return self._form.decode(self._codes).numpy(force=force)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._form.decode(self._codes).__array__(*args, **kwargs)  # type: ignore[no-untyped-call]

    def tolist(self) -> Any:
        """Its numbers."""
        return self._form.decode(self._codes).tolist()

    def data_ptr(self) -> NoReturn:
        """
        Raises:
            PlanError: there are no numbers in memory.
        """
        raise PlanError(
            f"settings.frozen_weights: the memory of a weight of {tuple(self.shape)} is asked for, which holds codes "
            "and no numbers. Use kind: none, or read the weight by torch's operations."
        )

    def storage(self) -> NoReturn:
        """As :meth:`data_ptr`."""
        self.data_ptr()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.data_ptr()

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
        kwargs = kwargs or {}
        if func in _SAME:
            return FrozenWeight(args[0]._codes, args[0]._form)
        if func is torch.ops.aten.clone.default:
            return FrozenWeight(args[0]._codes.clone(), args[0]._form)
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype", args[0].dtype) in _FLOATS:
            form = Form(args[0]._form.kind, args[0].shape, kwargs.get("dtype", args[0].dtype))
            return FrozenWeight(args[0]._codes.to(kwargs.get("device"), copy=True), form)
        ours = {id(one): one for one in tree_leaves((args, kwargs)) if isinstance(one, FrozenWeight)}
        numbers = {key: one._form.decode(one._codes) for key, one in ours.items()}
        read = lambda one: numbers[id(one)] if isinstance(one, FrozenWeight) else one  # noqa: E731
        result = func(*tree_map(read, args), **tree_map(read, kwargs))
        if not func._schema.is_mutable:
            return result
        written = chain(zip(func._schema.arguments, args, strict=False), _named(func, kwargs))
        changed = [leaf for argument, value in written if _is_written(argument) for leaf in tree_leaves(value)]
        for one in (leaf for leaf in changed if isinstance(leaf, FrozenWeight)):
            one._write(numbers[id(one)])
        back = {id(number): ours[key] for key, number in numbers.items()}
        return tree_map(lambda one: back.get(id(one), one), result)


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


def _linear(x: Any, weight: Any, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, FrozenWeight) or isinstance(x, FrozenWeight):
        return F.linear(*_full(x, weight, bias))
    return _product(x, weight, bias, is_transposed=False)


def _addmm(bias: Any, x: Any, weight: Any, **rest: Any) -> Tensor:
    """As transformers' Conv1D calls it."""
    if rest or not isinstance(weight, FrozenWeight) or isinstance(x, FrozenWeight) or bias.dim() != 1:
        return torch.addmm(*_full(bias, x, weight), **rest)
    return _product(x, weight, bias, is_transposed=True)


def _product(x: Tensor, weight: FrozenWeight, bias: Tensor | None, is_transposed: bool) -> Tensor:
    found: Tensor = _Product.apply(x, weight._codes, bias, weight._form, is_transposed)  # type: ignore[no-untyped-call]
    return found


def _embedding(numbers: Tensor, weight: Any, max_norm: float | None = None, **rest: Any) -> Tensor:
    """Torch names all but the first two."""
    if max_norm is not None:
        return F.embedding(numbers, weight._form.decode(weight._codes), max_norm=max_norm, **rest)
    return weight._form.rows(weight._codes, numbers)  # type: ignore[no-any-return]


def _full(*values: Any) -> list[Any]:
    return [one._form.decode(one._codes) if isinstance(one, FrozenWeight) else one for one in values]


def _refuse_gradient(weight: Tensor, wanted: bool = True) -> Tensor:
    """
    Raises:
        PlanError: a gradient is asked for, which codes cannot follow.
    """
    if wanted:
        raise PlanError(
            f"settings.frozen_weights: a weight of {tuple(weight.shape)} is kept as codes, since it did not train when "
            "the plan was applied, and its gradient is asked for now. Set requires_grad before the plan is applied, or "
            "apply one without frozen_weights first: it has the weights in full again."
        )
    return weight


def _refuse_grad(weight: Tensor, grad: Tensor | None) -> None:
    _refuse_gradient(weight, grad is not None)


def _set_data(weight: Any, value: Tensor) -> None:
    """What ``.data =`` does: with codes, take them over; with numbers, keep them as codes."""
    if not isinstance(value, FrozenWeight):
        weight._write(value.to(weight.device))
        return
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.data.__set__(weight, value)  # type: ignore[attr-defined]
    weight._codes, weight._form = value._codes, value._form


def _set_item(weight: Any, place: Any, value: Any) -> None:
    numbers, (value,) = weight._form.decode(weight._codes), _full(value)
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


def freeze(model: nn.Module, kind: str) -> int:
    """Keep weights that do not train as codes, in place: names, shapes and dtypes stay.

    Returns:
        How many there are.
    """
    made = {id(weight): FrozenWeight.of(weight, kind) for weight in frozen_weights(model)}
    for module, name, weight in _parameters(model):
        if id(weight) in made:
            module.register_parameter(name, made[id(weight)])  # type: ignore[arg-type]
            module.register_state_dict_post_hook(_in_full)  # type: ignore[no-untyped-call]
    return len(made)


def thaw(model: nn.Module) -> None:
    """Undo :func:`freeze`: the numbers stay as they were rounded."""
    made: dict[int, nn.Parameter] = {}
    for module, name, weight in _parameters(model):
        if isinstance(weight, FrozenWeight):
            full = made.setdefault(id(weight), weight.full())
            module.register_parameter(name, full)
            hooks = module._state_dict_hooks
            for key in [key for key, hook in hooks.items() if hook is _in_full]:
                del hooks[key]


def _parameters(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """All, with the modules that have them and their names there."""
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]


def frozen_weights(model: nn.Module) -> list[nn.Parameter]:
    """Weights of linear layers and embeddings that do not train and that codes would be smaller than.

    Only of torch's own classes and transformers' Conv1D: what has another forward, or makes its weight of others, is
    left alone.
    """
    known: dict[int, nn.Parameter] = {}
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        if _is_known(module) and _can_be_codes(weight):
            known[id(weight)] = weight
    return [*known.values()]


def _is_known(module: nn.Module) -> bool:
    own = type(module)
    is_conv1d = own.__name__ == "Conv1D" and own.__module__ == "transformers.pytorch_utils"
    is_table = own is nn.Embedding and module.max_norm is None
    return own is nn.Linear or is_conv1d or is_table


def _can_be_codes(weight: Any) -> bool:
    if type(weight) is not nn.Parameter or weight.dtype not in _FLOATS or weight.requires_grad:
        return False
    is_plain = weight.is_contiguous() and weight.numel() > 0
    return is_plain and Form("8bit", weight.shape, weight.dtype).num_bytes < weight.nbytes


def _in_full(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A state dict has numbers, unless it is asked for the very parameters."""
    for name, weight in module.named_parameters(recurse=False, remove_duplicate=False):
        kept: Any = state_dict.get(prefix + name)
        if isinstance(kept, FrozenWeight) and kept is not weight:
            state_dict[prefix + name] = kept._form.decode(kept._codes)
