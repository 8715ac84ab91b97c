"""``disagreement``: whether a cut model computes what the whole one does with zeros in the place of what is cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import Caught
from ..nested import tensors_in
from ..randomness import seed_everything, undisturbed
from .rebuild import rebuild, tensors_of
from .record import Kept, Record
from .twin import copied

Run = Callable[[nn.Module], Any]

_TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.05}
"""Of the norm of what is compared, by the type of its numbers; ``_FINE`` for others: sums have another order."""
_FINE = 1e-3
_RANDOM = frozenset(["bernoulli", "normal", "uniform", "exponential", "rand", "randn", "rand_like", "randn_like"])
"""Functions that draw as many numbers as there are channels, which no seed makes agree."""
_MOST_CHOICES = 64


class Disagreement(NamedTuple):
    """Where a cut model is seen to compute something else."""

    path: str | None
    """The module that it shows in; None where it is the model's output, or nobody knows."""
    words: str


def disagreement(model: nn.Module, run: Run, record: Record, trains: bool = True) -> Disagreement | None:
    """Compare what every layer takes in, and what the model returns, in the modes that it has now and in eval mode.

    Both models have the same weights, those that a layer begins with (all ones, all zeros) replaced by others that show
    what they multiply. What normalises over channels goes by their number: in the cut model its output is that of the
    whole one. Whatever draws random numbers gets ones that are all the same.

    Args:
        model: is left alone.
        run: its forward and loss on a few samples.
        record: of a cut of it.
        trains: run the cut model's backward pass too.

    Returns:
        None where the two agree.
    """
    whole = copied(model)
    _begin_elsewhere(whole)
    cut = copied(whole)
    rebuild(cut, record)
    _mask(whole, record)
    for mode in ("", " in eval mode") if model.training else ("", " in train mode", " in eval mode"):
        if mode:
            whole.train(mode == " in train mode")
            cut.train(mode == " in train mode")
        with Caught() as raised:
            said = _run(whole, run, noted := _Noting(whole))
        if raised.error is not None and not mode:
            raise raised.take()
        if raised.error is not None:
            continue  # it is never run so
        comparing = _Comparing(cut, noted.calls, record)
        with Caught() as raised:
            _compare_outputs(said, _run(cut, run, comparing, trains and not mode))
        if isinstance(raised.error, _Disagrees):
            return raised.error.found._replace(words=raised.error.found.words + mode)
        if raised.error is not None:
            where = comparing.entered[-1] if comparing.entered else None
            return Disagreement(where, f"{where or 'the model'} would fail{mode}: {words_of(raised.error)}")
    return None


class _Disagrees(Exception):
    """Ends the cut model's forward."""

    def __init__(self, path: str | None, words: str) -> None:
        super().__init__(words)
        self.found = Disagreement(path, words)


def _begin_elsewhere(model: nn.Module) -> None:
    """Replace parameters and running statistics that have one value throughout: zeros hide what they multiply."""
    generator = torch.Generator().manual_seed(0)
    statistics = [name for name, _ in model.named_buffers() if name.endswith(("running_mean", "running_var"))]
    tensors = tensors_of(model)
    for name in [*(name for name, _ in model.named_parameters()), *statistics]:
        value = tensors[name].data
        if value.numel() > 1 and value.is_floating_point() and bool((value == value.flatten()[0]).all()):
            value.copy_(torch.rand(value.shape, generator=generator) + 0.5)


def _mask(model: nn.Module, record: Record) -> None:
    """Zeros in the place of what the record cuts, on all sides."""
    tensors = tensors_of(model)
    for name, kept in record.tensors.items():
        for dim, number in enumerate(kept.sets):
            if number is not None:
                gone = torch.ones(kept.shape[dim], dtype=torch.bool)
                gone[list(record.sets[number])] = False
                tensors[name].data.index_fill_(dim, gone.nonzero().flatten(), 0)


@dataclass
class _Call:
    """One call of a module."""

    inputs: list[Tensor]
    output: Any = None
    """Of what normalises over channels alone."""


class _Noting:
    """Notes the calls of the whole model's layers."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.calls: dict[str, list[_Call]] = {name: [] for name, one in model.named_modules() if _is_layer(one)}

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Its inputs."""
        if (calls := self.calls.get(self.names[module])) is not None:
            calls.append(_Call([one.detach().clone() for one in _numbers_in((args, kwargs))]))

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Its output."""
        if _goes_by_width(module) and isinstance(output, Tensor):
            call = self.calls[self.names[module]][-1]
            if call.inputs and call.inputs[0].shape == output.shape:
                call.output = output.detach().clone()


class _Comparing:
    """Compares the calls of the cut model's layers with those, and puts in what goes by the number of channels."""

    def __init__(self, model: nn.Module, calls: dict[str, list[_Call]], record: Record) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._calls = {name: iter(one) for name, one in calls.items()}
        self._record = record
        self._sets: list[tuple[int, Tensor]] = []
        """By which the last module that normalises over channels was found to agree."""
        self.entered: list[str] = []
        """Paths of the modules that run now, outermost first."""
        self._now: _Call | None = None

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Its inputs."""
        name = self._names[module]
        self.entered.append(name)
        if name not in self._calls:
            return
        call = next(self._calls[name], None)
        found = [*_numbers_in((args, kwargs))]
        if call is None or len(call.inputs) != len(found):
            raise _Disagrees(name, f"{name} would be called otherwise than in the whole model")
        self._now = call
        for whole, ours in zip(call.inputs, found, strict=True):
            sets = next(
                (one for one in self._choices(module, name, whole, ours) if _agree(_take(whole, one), ours)), None
            )
            if sets is None:
                raise _Disagrees(name, f"{name} would take in something else than what is left of its inputs")
            self._sets = sets

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Its output, or the whole model's in its place."""
        self.entered.pop()
        if (
            not _goes_by_width(module)
            or self._now is None
            or self._now.output is None
            or not isinstance(output, Tensor)
        ):
            return None
        wanted = _take(self._now.output, self._sets)
        if wanted.shape != output.shape:
            return None
        return output + (wanted.to(output.dtype) - output).detach()

    def _choices(self, module: nn.Module, name: str, whole: Tensor, ours: Tensor) -> Iterator[list[tuple[int, Tensor]]]:
        """By which indices of which dimensions the whole one's input may be what is left of it: for a layer that is
        known there is one choice, for another all of its own sets of that size, or the record's."""
        kept = self._record.tensors.get(f"{name}.weight") or self._record.tensors.get(f"{name}.running_mean")
        if (known := _input_dim(module)) is not None:
            number = kept.sets[known[0]] if kept is not None else None
            yield [] if number is None else [(known[1], torch.tensor(self._record.sets[number]))]
            return
        if isinstance(module, _ConvNd) and kept is not None:
            yield [*_of_parts(module, kept, self._record)]
            return
        if whole.dim() != ours.dim():
            return
        changed = [dim for dim, pair in enumerate(zip(whole.shape, ours.shape, strict=True)) if pair[0] != pair[1]]
        own = {n for key, one in self._record.tensors.items() if key.rpartition(".")[0] == name for n in one.sets}
        sizes: dict[int, set[int]] = {}
        for one in self._record.tensors.values():
            for size, number in zip(one.shape, one.sets, strict=True):
                if number is not None:
                    sizes.setdefault(number, set()).add(size)
        options = []
        for dim in changed:
            fitting = [
                number
                for number, befores in sizes.items()
                if whole.shape[dim] in befores and len(self._record.sets[number]) == ours.shape[dim]
            ]
            options.append([number for number in fitting if number in own] or fitting)
        for numbers in itertools.islice(itertools.product(*options), _MOST_CHOICES):
            yield [(dim, torch.tensor(self._record.sets[n])) for dim, n in zip(changed, numbers, strict=True)]


def _is_layer(module: nn.Module) -> bool:
    has_own = next(module.parameters(recurse=False), None) is not None
    return has_own or next(module.buffers(recurse=False), None) is not None or _goes_by_width(module)


def _goes_by_width(module: nn.Module) -> bool:
    """Whether it normalises over channels; those that go by each channel are compared as all others."""
    name = type(module).__name__
    is_each = name.startswith(("BatchNorm", "InstanceNorm", "SyncBatchNorm", "Lazy", "FrozenBatchNorm"))
    return "norm" in name.lower() and not is_each and next(module.children(), None) is None


def _input_dim(module: nn.Module) -> tuple[int, int] | None:
    """Of a known layer: the dimension of its weight that takes the input's channels, and the input's; None of others,
    and where the weight has them in groups."""
    if isinstance(module, nn.Linear):
        return 1, -1
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return 0, -1
    if isinstance(module, _ConvNd) and (module.groups == 1 or module.transposed):
        return 0 if module.transposed else 1, -1 - len(module.kernel_size)
    if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)):
        return 0, 1
    return None


def _of_parts(module: _ConvNd, kept: Kept, record: Record) -> Iterator[tuple[int, Tensor]]:
    """What a cut convolution in groups takes in: the same of each, or where each has one, as many as it gives."""
    first, within = kept.sets[:2]
    size = kept.shape[1]
    dim = -1 - len(module.kernel_size)
    if within is not None:
        places = torch.tensor(record.sets[within])
        yield dim, torch.cat([places + size * part for part in range(module.groups)])
    elif first is not None and size == 1:
        yield dim, torch.tensor(record.sets[first])


def _take(whole: Tensor, sets: list[tuple[int, Tensor]]) -> Tensor:
    for dim, indices in sets:
        whole = whole.index_select(dim, indices)
    return whole


def _agree(wanted: Tensor, found: Tensor) -> bool:
    if wanted.shape != found.shape:
        return False
    tolerance = _TOLERANCE.get(found.dtype, _FINE)
    one, other = (each.detach().float().nan_to_num(0.0, 0.0, 0.0) for each in (wanted, found))
    return bool(torch.dist(one, other) <= tolerance * one.norm())


def _numbers_in(value: Any) -> Iterator[Tensor]:
    return (one for one in tensors_in(value) if one.is_floating_point())


def _run(model: nn.Module, run: Run, watch: _Noting | _Comparing, trains: bool = False) -> list[Tensor]:
    """What the model returned, and the loss."""
    returned: list[Any] = []
    with undisturbed(), _Fixed():  # type: ignore[no-untyped-call]
        seed_everything(0)
        with _watched(model, watch, returned):
            loss = run(model)
        losses = [one for one in tensors_in(loss) if one.grad_fn is not None]
        if trains and losses:
            losses[0].sum().backward()  # type: ignore[no-untyped-call]
    return [one.detach() for one in _numbers_in([returned, loss])]


@contextmanager
def _watched(model: nn.Module, watch: _Noting | _Comparing, returned: list[Any]) -> Iterator[None]:
    handles = [model.register_forward_hook(lambda *said: returned.append(said[2]))]
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(watch.before, with_kwargs=True))
        handles.append(module.register_forward_hook(watch.after, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _compare_outputs(whole: list[Tensor], cut: list[Tensor]) -> None:
    shapes, found = ([list(one.shape) for one in each] for each in (whole, cut))
    if shapes != found:
        raise _Disagrees(None, f"the model would return {_words(found)}, where it returns {_words(shapes)}")
    if not all(map(_agree, whole, cut)):
        raise _Disagrees(None, "the model would return something else")


def _words(shapes: list[list[int]]) -> str:
    return ", ".join(map(str, shapes)) or "no tensors"


class _Fixed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Random numbers are all the same."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do not import the compiler, which takes seconds, for a decoration that matters within compiled code alone."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.rstrip("_") in _RANDOM:
            for one in _numbers_in(result):
                one.fill_(0.5)
        return result


def words_of(error: BaseException) -> str:
    """What a model or a library says; of Python's own errors no more than that its code does not go with fewer."""
    said = str(error).strip().splitlines()
    is_told = isinstance(error, (RuntimeError, ValueError, AssertionError)) and said
    return said[0] if is_told else "its code goes by how many there are"
