"""``OffloadedWeight``: a parameter whose numbers are fetched by each operation that reads them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ....errors import PlanError
from ..elsewhere import Elsewhere
from .kept_content import Content, Store

_Step = Callable[[Tensor], Tensor]


class OffloadedWeight(Elsewhere):
    """A parameter of the shape, dtype and device that it had, or a view of one, or one in another dtype.

    What autograd saves of it is no number either: backward fetches them again. What writes to it or to a view of it
    writes to what is kept.
    """

    in_parts: ClassVar[bool] = True
    """Dispatch modes that watch see the operations that one of it is made of."""
    _no_memory: ClassVar[str] = (
        "settings.offload: the memory of a weight of {shape} is asked for, which is offloaded. Use kind: none, leave "
        "its block out of blocks, or read the weight by torch's operations."
    )
    _content: Content
    _steps: tuple[_Step, ...]
    """That make this of what is kept: views and casts."""
    _trains: bool = False
    """Whether it may have gradients: its plan is for training, and it trained when that was applied."""
    _trained: bool = False
    """Whether it did before a plan for inference."""

    @staticmethod
    def __new__(
        cls: type[OffloadedWeight], content: Content, like: Tensor, steps: tuple[_Step, ...] = ()
    ) -> OffloadedWeight:
        """
        Args:
            content: the numbers.
            like: of this one's shape, strides and dtype.
            steps: from the one to the other.
        """
        made: OffloadedWeight = Tensor._make_wrapper_subclass(
            cls, like.size(), like.stride(), like.storage_offset(), dtype=like.dtype, device=content.sign.device
        )
        made._content, made._steps = content, steps
        return made

    @classmethod
    def of(cls, weight: Tensor, store: Store, in_inference: bool = False, block: int | None = None) -> OffloadedWeight:
        """A parameter's numbers elsewhere, with what hangs on it."""
        content = store.content(weight.detach())
        content.block = block
        made: Any = _parameter(content)
        vars(made).update(vars(weight))
        made._trains, made._trained = weight.requires_grad and not in_inference, weight.requires_grad and in_inference
        return made.requires_grad_(made._trains)  # type: ignore[no-any-return]

    @classmethod
    def state(cls, numbers: Tensor, weight: OffloadedWeight) -> OffloadedWeight:
        """What an optimizer keeps of a weight, where that is.

        Raises:
            UserError: the disk is full.
        """
        content = weight.store.content(numbers)
        content.block, content.is_state = weight.content.block, True
        content.to_file()
        made = OffloadedWeight(content, _like(content))
        content.store.note(made, content)
        return made

    def full(self) -> nn.Parameter:
        """In memory, where it trains if it does or did."""
        made = super().full()
        trained = vars(made).pop("_trained", False)
        vars(made).pop("_trains", None)
        made.requires_grad, made.grad = self.requires_grad or trained, self.grad
        return made

    def lent(self) -> AbstractContextManager[Tensor]:
        """Its numbers, where they are written to; see :meth:`Content.lent`."""
        return self._content.lent()

    @property
    def is_for_training(self) -> bool:
        """Whether it trains, or would but for a plan for inference."""
        return self._trains or self._trained

    @property
    def store(self) -> Store:
        """Of its model."""
        return self._content.store

    def numbers(self) -> Tensor:
        """All of them: not to be written to."""
        return self._made_of(self._content.fetch())

    def _made_of(self, numbers: Tensor) -> Tensor:
        for step in self._steps:
            numbers = step(numbers)
        return numbers

    def fresh(self) -> Tensor:
        """A copy of what others may fetch."""
        return self.numbers().clone() if self._steps else self._content.anew()

    def stored(self) -> Tensor:
        """A copy in the host's memory, where all of a card's may have room."""
        return self.fresh() if self._steps else self._content.stored()

    @property
    def content(self) -> Content:
        """What it is, or is made of."""
        return self._content

    def moved(self, device: torch.device) -> OffloadedWeight:
        """The same on another device.

        Raises:
            PlanError: it is not offloaded from that one's memory.
        """
        return OffloadedWeight(self._content.moved(device), self._as_meta(), self._steps)

    def _as_meta(self) -> Tensor:
        return _meta(self.size(), self.stride(), self.dtype, self.storage_offset())

    def is_copy(self) -> bool:
        """Whether it is the same numbers in another dtype, which nobody sees others through."""
        return any(isinstance(step, _Cast) for step in self._steps)

    def settle(self) -> None:
        """Keep its numbers by themselves."""
        numbers = self.fresh()
        self._content, self._steps = self._content.store.content(numbers), ()

    def untyped_storage(self) -> torch.UntypedStorage:
        """None of its own: without bytes, the same for all views."""
        return self._content.sign.untyped_storage()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OffloadedWeight({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedWeight:
        if id(self) not in memo:
            if self._steps:
                self.settle()
            content = self._content.__deepcopy__(memo) if id(self._content) not in memo else memo[id(self._content)]
            memo[id(self)] = _rebuilt(content, _hanging_on(self), self.requires_grad and self.is_leaf)
        found: OffloadedWeight = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._steps:
            self.settle()
        return _rebuilt, (self._content, _hanging_on(self), self.requires_grad and self.is_leaf)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKS:
            _check_gradient(*args, **(kwargs or {}))
        elif func == _SETS_DATA:
            return _set_data(*args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return _dispatched(func, args, kwargs or {})


class _View:
    """A view of a tensor, or one of several."""

    def __init__(self, func: Any, args: Any, kwargs: Any, number: int | None = None) -> None:
        self._func, self._args, self._kwargs, self._number = func, args, kwargs, number

    def __call__(self, numbers: Tensor) -> Tensor:
        found = self._func(numbers, *self._args, **self._kwargs)
        return found if self._number is None else found[self._number]  # type: ignore[no-any-return]


class _Cast(_View):
    """The same numbers in another dtype."""


def _dispatched(func: Any, args: Any, kwargs: Any) -> Any:
    first = args[0] if args and isinstance(args[0], OffloadedWeight) else None
    if first is not None and torch.Tag.inplace_view in func.tags and func is not torch.ops.aten.detach_.default:
        raise PlanError(
            f"settings.offload: {func._schema.name.removeprefix('aten::')} was to change the shape of a weight of "
            f"{tuple(first.shape)} in place, which is offloaded. Use kind: none, or assign another tensor."
        )
    if func in _SAME:
        return _again(args[0])
    if func is torch.ops.aten._to_copy.default and first is not None:
        return _converted(first, func, args[1:], kwargs)
    if first is not None and _is_view(func):
        return _viewed(first, _View, func, args[1:], kwargs)
    ours = {id(one): one for one in tree_leaves((args, kwargs)) if isinstance(one, OffloadedWeight)}
    written = _written(func, args, kwargs) if func._schema.is_mutable else ()
    changed = [one for one in written if isinstance(one, OffloadedWeight)]
    for one in changed:
        _part(one)
    bases = {id(one._content): one._content.to_write() for one in changed}
    numbers = {
        key: one._made_of(bases[id(one._content)]) if id(one._content) in bases else one.numbers()
        for key, one in ours.items()
    }
    read = lambda one: numbers[id(one)] if isinstance(one, OffloadedWeight) else one  # noqa: E731
    result = func(*tree_map(read, args), **tree_map(read, kwargs))
    for one in changed:
        one._content.write(bases[id(one._content)])
    back = {id(number): ours[key] for key, number in numbers.items()}
    return tree_map(lambda one: back.get(id(one), one), result) if changed else result


def _again(weight: OffloadedWeight) -> OffloadedWeight:
    made = OffloadedWeight(weight._content, weight, weight._steps)
    _note(made)
    return made


def _converted(weight: OffloadedWeight, func: Any, args: Any, kwargs: Any) -> Any:
    """In another dtype: when it is read. On another device: at once.

    Raises:
        PlanError: it is not offloaded from that one's memory.
    """
    device, others = kwargs.get("device"), {key: one for key, one in kwargs.items() if key != "device"}
    if device is not None and torch.device(device) != weight.device:
        weight = weight.moved(torch.device(device))
        if kwargs.get("dtype") in (None, weight.dtype) and kwargs.get("memory_format") in _KEEPS_ORDER:
            return weight
    return _viewed(weight, _Cast, func, args, others)


def _viewed(weight: OffloadedWeight, kind: type[_View], func: Any, args: Any, kwargs: Any) -> Any:
    if weight._content.is_lent:  # who writes to the view writes to what is kept at the end
        return func(weight.numbers(), *args, **kwargs)
    with torch._C._DisableTorchDispatch():
        found = func(weight._as_meta(), *args, **kwargs)
    several = isinstance(found, list | tuple)
    made = [
        OffloadedWeight(weight._content, one, (*weight._steps, kind(func, args, kwargs, number if several else None)))
        for number, one in enumerate(found if several else (found,))
    ]
    for one in made:
        _note(one)
    return made if several else made[0]


def _meta(size: Any, stride: Any, dtype: torch.dtype, offset: Any = 0) -> Tensor:
    with torch._C._DisableTorchDispatch():
        last = offset + 1 + sum((one - 1) * step for one, step in zip(size, stride, strict=True))
        whole = torch.empty(max(last, 0), dtype=dtype, device="meta")
        return whole.as_strided(size, stride, offset)


def _like(content: Content) -> Tensor:
    return _meta(content.size, content.stride, content.dtype)


def _note(weight: OffloadedWeight) -> None:
    """Its content is told of a copy that is yet to be made."""
    if weight.is_copy():
        copies = weight._content.copies
        copies[:] = [one for one in copies if one() is not None]
        copies.append(weakref.ref(weight))


def _part(weight: OffloadedWeight) -> None:
    """Before it is written to: copies of it that are yet to be made are made, and it is itself no such copy."""
    if weight.is_copy():
        weight.settle()
    weight._content.settle_copies(but=weight)


def _is_view(func: Any) -> bool:
    return not func._schema.is_mutable and any(one.alias_info is not None for one in func._schema.returns)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    arguments = func._schema.arguments
    named = ((one, kwargs[one.name]) for one in arguments if one.name in kwargs)
    for argument, value in chain(zip(arguments, args, strict=False), named):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tree_leaves(value)


_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_KEEPS_ORDER = (None, torch.preserve_format)


def _parameter(content: Content) -> Any:
    made = nn.Parameter(OffloadedWeight(content, _like(content)), requires_grad=False)
    content.store.note(made, content)
    return made


def _hanging_on(weight: OffloadedWeight) -> dict[str, Any]:
    return {name: value for name, value in vars(weight).items() if name not in ("_content", "_steps")}


def _rebuilt(content: Content, rest: dict[str, Any], trains: bool = False) -> OffloadedWeight:
    made = OffloadedWeight(content, _like(content))
    content.store.note(made, content)
    vars(made).update(rest)
    with torch._C.DisableTorchFunctionSubclass():
        made.requires_grad_(trains)
    return made


def _check_gradient(weight: OffloadedWeight, *args: Any, **kwargs: Any) -> None:
    """
    Raises:
        PlanError: a gradient is asked for, or given, which it cannot have.
    """
    wanted = next(iter((*args, *kwargs.values())), True)
    if wanted is not None and wanted is not False and not weight._trains:
        raise PlanError(
            f"settings.offload: a weight of {tuple(weight.shape)} is offloaded, since it did not train when the plan "
            "was applied, or that is for inference, and its gradient is asked for now. Set requires_grad before a plan "
            "for training is applied, or apply one without offload first: it has the weights in memory again."
        )


def _set_data(weight: Any, value: Tensor) -> None:
    """What ``.data =`` does: the numbers, of whatever shape, dtype and device, are kept."""
    if not isinstance(value, OffloadedWeight):
        value = OffloadedWeight(content := weight._content.store.content(value.clone()), _like(content))
    elif value._steps:
        value.settle()
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.data.__set__(weight, value)  # type: ignore[attr-defined]
    if value._content.block is None:
        value._content.block = weight._content.block
    weight._content, weight._steps = value._content, value._steps


_ASKS = (Tensor.requires_grad_, Tensor.requires_grad.__set__, Tensor.grad.__set__)  # type: ignore[attr-defined, union-attr]
_SETS_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
"""What is answered here; all else is done by torch, with the numbers."""
