"""``Recorder``: what a script computes from its model's call to the loss, recorded to be computed again over copies."""

from __future__ import annotations

import gc
import math
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...measure.profiling.tracer import MostAlive
from ...nested import mapped, tensors_in

_EMPTY = torch.empty(0)
"""Stands in recorded arguments where a tensor is to be."""


@dataclass(frozen=True)
class _Operation:
    """A call of the model, or of a function of torch's."""

    run: Callable[..., Any] | None
    """None is the model."""
    arguments: Any
    """Positional and named ones, without their tensors."""
    reads: tuple[int | str, ...]
    """Its tensors, in order: numbers, and names of the model's own."""
    writes: tuple[int, ...]
    """Numbers of the tensors that it returns, or changes in place."""
    autocast: torch.dtype | None
    """What the script's own autocast around it computes in."""

    def again(self, model: nn.Module, values: Sequence[Tensor]) -> list[Tensor]:
        """What it returns, or changes, given other tensors to read."""
        rest = iter(values)
        args, kwargs = mapped(self.arguments, lambda _: next(rest))
        own = nullcontext() if self.autocast is None else torch.autocast(_device_of(model), self.autocast)
        with own:
            return _written(self.run, args, (self.run or model)(*args, **kwargs))


@dataclass(frozen=True)
class RecordedPass:
    """A forward pass of a script, as a function of a model and a batch: a loss as ``autotune.fit`` takes it."""

    operations: tuple[_Operation, ...]
    """Those that lead to the loss."""
    places: tuple[int, ...]
    """Numbers of the batch's tensors."""
    batch: tuple[Tensor, ...]
    """What the script had before, and whatever no gradient goes through."""
    loss: int
    """Its number."""
    held: tuple[int, ...] = ()
    """Numbers of what the script's names hold until its next pass."""
    beside: Mapping[int, int] = field(default_factory=dict)
    """Most bytes that a module takes which is called without gradients, by how many operations come before."""

    @property
    def num_elements(self) -> int:
        """Of the batch."""
        return sum(tensor.numel() for tensor in self.batch)

    def __call__(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """The loss.

        Args:
            model: the script's, or a copy.
            batch: tensors in place of those that the script had.
        """
        values: dict[int | str, Tensor] = dict(zip(self.places, batch, strict=True))
        values.update(_own_tensors(model))
        for number, one in enumerate(self.operations):
            _take(model, self.beside.get(number, 0))
            written = one.again(model, [values[place] for place in one.reads])
            values.update(zip(one.writes, written, strict=True))
        after = (num_bytes for number, num_bytes in self.beside.items() if number >= len(self.operations))
        _take(model, max(after, default=0))
        loss, held = values[self.loss], [values[place] for place in self.held if place in values]
        loss.register_hook(partial(_hold, held))  # type: ignore[no-untyped-call]
        return loss


@dataclass
class _Pass:
    """What is known of the pass that goes on."""

    device: str
    """Its type."""
    own: dict[int, str]
    """Names of the model's tensors, by their ids."""
    operations: list[_Operation] = field(default_factory=list)
    beside: dict[int, int] = field(default_factory=dict)
    """As a :class:`RecordedPass` has it."""
    held: list[Tensor] = field(default_factory=list)
    """In the order of their numbers; no id is another's meanwhile."""
    numbers: dict[int, int] = field(default_factory=dict)
    """By their ids."""
    given: set[int] = field(default_factory=set)
    """Numbers of those that no operation has made."""
    unseen: dict[int | str, str] = field(default_factory=dict)
    """What made those of them that a gradient goes through."""
    is_lost: bool = False
    """Whether a part of it was not seen."""

    @property
    def num_elements(self) -> int:
        """Of its batch, and of whatever else it was given."""
        return sum(self.held[number].numel() for number in self.given)

    def number(self, tensor: Tensor) -> int:
        """A new number for it."""
        self.held.append(tensor)
        self.numbers[id(tensor)] = len(self.held) - 1
        return len(self.held) - 1

    def place(self, tensor: Tensor) -> int | str:
        """Where it is found."""
        if id(tensor) in self.own:
            return self.own[id(tensor)]
        if id(tensor) not in self.numbers:
            self.given.add(number := self.number(tensor))
            if tensor.grad_fn is not None:
                self.unseen[number] = tensor.grad_fn.name()
        return self.numbers[id(tensor)]

    def reads(self, run: Callable[..., Any] | None, arguments: Any) -> Callable[[Any], _Operation]:
        """An operation that is about to run; it is known once called with what that has written."""
        places = tuple(map(self.place, tensors_in(arguments)))
        empty = mapped(arguments, lambda _: _EMPTY)
        autocast = torch.get_autocast_dtype(self.device) if torch.is_autocast_enabled(self.device) else None
        return lambda written: _Operation(run, empty, places, tuple(map(self.number, written)), autocast)


class Recorder(TorchFunctionMode):
    """Records each forward pass of a script's model, and what the script makes of it up to the backward pass.

    Source: torch's TorchFunctionMode, https://docs.pytorch.org/docs/stable/torch.overrides.html
    """

    def __init__(self) -> None:
        super().__init__()
        self.why = "no loss of a call of its model is passed back"
        """Why nothing was recorded, in words; of the largest pass that could not be."""
        self.lost_elements = -1.0
        """Of the batch of that pass, which may take more than those that were; infinite where it is not known."""
        self.has_begun = False
        """Whether calls without gradients count."""
        self._last: dict[int, weakref.ref[Tensor]] = {}
        """What the last pass has made, by number."""
        self._pass: _Pass | None = None
        self._call: Callable[[Any], _Operation] | None = None
        self._taken_bytes = 0
        """By modules that were called without gradients since the last pass."""
        self._known_bytes: weakref.WeakKeyDictionary[nn.Module, dict[Any, int]] = weakref.WeakKeyDictionary()
        """What their calls take, by shapes and dtypes of inputs."""
        self._is_on = self._is_seen = False
        self._probe = torch.empty(0)
        """A tensor of the recorder's own, by which it sees that it is on."""

    def begin(self) -> None:
        """The first pass is about to come: what was called before this does not count."""
        self.has_begun, self._taken_bytes = True, 0

    def called(self, model: nn.Module, inputs: Any) -> None:
        """The model is about to be called with ``inputs``, positional ones and named ones."""
        self._switch(on=False)
        self.has_begun = True
        if self._pass is None:
            own = {id(tensor): name for name, tensor in _own_tensors(model).items()}
            self._pass = _Pass(_device_of(model), own, beside={0: self._taken_bytes})
            self._taken_bytes = 0
        self._call = self._pass.reads(None, inputs)

    def returned(self, outputs: Any) -> None:
        """The call is over."""
        if self._pass is not None and self._call is not None:
            self._pass.operations.append(self._call([*tensors_in(outputs)]))
            self._call = None
            self._switch(on=True)

    @contextmanager
    def beside(self, module: nn.Module, inputs: Any) -> Iterator[None]:
        """A module is called without gradients (a teacher, a target network): what it takes for a while counts at its
        place in the pass, and before a pass as that begins. The first call with such inputs is looked into."""
        is_on, known, most = self._is_on, self._known_bytes.setdefault(module, {}), MostAlive(_device_of(module))
        key = tuple((tensor.shape, tensor.dtype) for tensor in tensors_in(inputs))
        self._switch(on=False)
        try:
            with nullcontext() if key in known else most:
                yield
        finally:
            num_bytes = known.setdefault(key, most.num_bytes)
            if self._pass is None:
                self._taken_bytes = max(self._taken_bytes, num_bytes)
            else:
                keep_most(self._pass.beside, {len(self._pass.operations): num_bytes})
            self._switch(on=is_on)

    def passed_back(self, loss: Any) -> RecordedPass | None:
        """What led to the loss of a backward pass; None where that is of no call of the model, or cannot be told."""
        self._switch(on=False)
        one, self._pass = self._pass, None
        if one is None or one.is_lost:
            return None
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            self._lose("what is passed back is not one number", one.num_elements)
            return None
        made = ((number, one.held[number]) for each in one.operations for number in each.writes)
        self._last = {number: weakref.ref(tensor) for number, tensor in made if tensor is not loss}
        return self._led_to(loss, one)

    def held(self) -> dict[int, Tensor]:
        """What the script still holds of the last pass, by number."""
        gc.collect()
        return {number: tensor for number, one in self._last.items() if (tensor := one()) is not None}

    def _switch(self, on: bool) -> None:
        if on and not self._is_on:
            self.__enter__()  # type: ignore[no-untyped-call]
        elif self._is_on and not on:
            self._is_seen = False
            self._probe.numel()
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if not self._is_seen:
                self._give_up("a `with` block that is not of autotune ends in a pass")
        self._is_on = on

    def _give_up(self, why: str) -> None:
        if self._pass is not None:
            self._pass.is_lost = True
            self._lose(why, math.inf)

    def _lose(self, why: str, num_elements: float) -> None:
        if num_elements > self.lost_elements:
            self.lost_elements, self.why = num_elements, why

    def __torch_function__(self, run: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record what a gradient goes through; the rest is as if it were given."""
        assert self._pass is not None, "it is on within a pass"
        if args and args[0] is self._probe:
            self._is_seen = True
            return run(*args)
        operation = self._pass.reads(run, (args, kwargs or {}))
        found = run(*args, **(kwargs or {}))
        written = _written(run, args, found)
        if any(tensor.requires_grad for tensor in written):
            self._pass.operations.append(operation(written))
        return found

    def _led_to(self, loss: Tensor, one: _Pass) -> RecordedPass | None:
        found = one.place(loss)
        needed = {found}
        lead: list[int] = []
        for number, each in reversed([*enumerate(one.operations)]):
            if not needed.isdisjoint(each.writes):
                lead.insert(0, number)
                needed.update(each.reads)
        operations = tuple(one.operations[number] for number in lead)
        if unseen := [one.unseen[number] for number in sorted(needed & one.unseen.keys(), key=str)]:
            self._lose(f"its loss goes by what is not seen ({unseen[0]})", one.num_elements)
            return None
        if not isinstance(found, int) or all(each.run is not None for each in operations):
            return None
        places = tuple(sorted(one.given & needed))
        batch = tuple(map(_given, (one.held[place] for place in places)))
        beside: dict[int, int] = {}
        for number, num_bytes in one.beside.items():
            keep_most(beside, {bisect_left(lead, number): num_bytes})
        return RecordedPass(operations, places, batch, found, beside=beside)


def keep_most(known: dict[int, int], others: Mapping[int, int]) -> None:
    """Have the larger of two numbers wherever either has one."""
    known |= {key: max(number, known.get(key, 0)) for key, number in others.items()}


def _hold(held: Sequence[Tensor], gradient: Tensor) -> None:
    """A hook that leaves the gradient as it is, and keeps tensors for as long as there is a graph."""


def _given(tensor: Tensor) -> Tensor:
    """A tensor of the script's as a pass is given it: with gradients where it takes some, as of a penalty on them."""
    return tensor.detach().requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _take(model: nn.Module, num_bytes: int) -> None:
    """Have so many bytes, where the model is, and give them back."""
    if num_bytes:
        next(model.parameters()).new_empty(num_bytes, dtype=torch.uint8)


def _written(run: Callable[..., Any] | None, args: Sequence[Any], found: Any) -> list[Tensor]:
    """What a call has returned, or has changed without returning it."""
    return [args[0]] if run is Tensor.__setitem__ else [*tensors_in(found)]


def _device_of(model: nn.Module) -> str:
    return next(model.parameters()).device.type


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)))
