"""Finds out, by one forward over fake tensors, which layers save each activation's output for backward anyway."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..internals.fake_tensors import FakeCopyMode, FakeTensor, FakeTensorMode
from ..randomness import undisturbed
from .equivalent_ops import find_equivalent_op
from .graph import is_in_checkpoint

Savers = tuple[list[nn.Parameter], bool]
"""Who saves a tensor for backward: weights (saved while one of them trains), and whether it is saved in any case."""

_BITS = frozenset((F.relu, torch.relu, Tensor.relu, F.leaky_relu, F.relu6, F.hardtanh))
"""What keeps bits of its output, or nothing."""
_ACTIVATIONS = _BITS | {F.gelu, F.silu}
"""What keeps less where nobody else keeps its output."""
_SMOOTH = frozenset((F.gelu, F.silu))
_READ_INPUT = _SMOOTH | {F.leaky_relu, F.relu6, F.hardtanh}
"""Of these, what keeps its input in stock torch: where another keeps that too, it takes nothing."""
_PLAIN = (nn.Parameter, FakeTensor)
"""Not a parameter that its class keeps from training."""
_WEIGHTED = {
    F.linear: 1, F.conv1d: 1, F.conv2d: 1, F.conv3d: 1, F.conv_transpose1d: 1, F.conv_transpose2d: 1,
    F.conv_transpose3d: 1, torch.addmm: 2,
}  # fmt: skip
"""What keeps its input while a weight trains: where the weight stands, behind the input."""
_KEEP_NOTHING = frozenset(
    (F.dropout, F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d,
     F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
)  # fmt: skip
"""What keeps neither input nor output once it is converted."""


class SharedSavers:
    """Within this context one run of a model serves all its copies: what it found is kept by the names of modules and
    weights."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[tuple[list[str], bool], ...]] | None = None

    def __enter__(self) -> Self:
        self._before = _SHARED.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _SHARED.reset(self._before)

    def of(
        self, model: nn.Module, find: Callable[[], dict[nn.Module, tuple[Savers, Savers]]]
    ) -> dict[nn.Module, tuple[Savers, Savers]]:
        """The savers in this copy of the model; the first time, ``find`` runs it."""
        if self._found is None:
            found = find()
            weights = {id(weight): name for name, weight in model.named_parameters()}
            self._found = {
                name: tuple(([weights[id(one)] for one in savers], always) for savers, always in found[module])
                for name, module in model.named_modules()
                if module in found
            }
            return found
        modules, named = dict(model.named_modules()), dict(model.named_parameters())
        return {
            modules[name]: (([named[one] for one in output], is_kept), ([named[one] for one in read], is_read))
            for name, ((output, is_kept), (read, is_read)) in self._found.items()
        }


_SHARED: ContextVar[SharedSavers | None] = ContextVar("_SHARED", default=None)


def find_savers(model: nn.Module, run: Callable[[nn.Module], Any]) -> dict[nn.Module, tuple[Savers, Savers]]:
    """For each module that calls an activation in this run: who else saves the activation's output, and its input.

    The model and all that is computed from it are fake tensors. All else, such as a mask, is real: a forward that
    stores it for its next run finds it as usual.

    Args:
        model: not converted; neither it nor the state of random numbers is changed.
        run: runs a forward of the copy of the model, of fake tensors, that it is given.

    Returns:
        By module of ``model``, those that called no activation left out. Of a module that is called several times, all
        who keep the output, or the input, of any.

    Raises:
        Exception: whatever ``run`` raises, or a copy of the model: values of fake tensors cannot be read.
    """
    shared = _SHARED.get()
    return _find_savers(model, run) if shared is None else shared.of(model, lambda: _find_savers(model, run))


def _find_savers(model: nn.Module, run: Callable[[nn.Module], Any]) -> dict[nn.Module, tuple[Savers, Savers]]:
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(fakes):
        copied = copy.deepcopy(model)
    originals = {id(fake): own for fake, own in zip(copied.parameters(), model.parameters(), strict=True)}
    _let_all_train(copied)
    watch = _Watch(originals)
    for own, fake in zip(model.modules(), copied.modules(), strict=True):
        watch.follow(own, fake)
    with undisturbed(), watch, torch.enable_grad():
        run(copied)
    return {module: watch.kept(module) for module in watch.made}


def _let_all_train(model: nn.Module) -> None:
    for parameter in model.parameters():
        if type(parameter) in _PLAIN:
            parameter.requires_grad_(parameter.is_floating_point())


class _Watch(TorchFunctionMode):
    """Sees what each call keeps. Storages are told apart by address, and stay alive until the end."""

    def __init__(self, originals: dict[int, nn.Parameter]) -> None:
        super().__init__()
        self.made: dict[nn.Module, set[int]] = {}
        self._read: dict[nn.Module, set[int]] = {}
        self._originals = originals
        self._weights: dict[int, list[nn.Parameter]] = {}
        self._always: set[int] = set()
        self._by_smooth: set[int] = set()
        self._recomputed: set[int] = set()
        self._alive: list[torch.UntypedStorage] = []
        self._running: list[nn.Module] = []

    def follow(self, own: nn.Module, fake: nn.Module) -> None:
        """Say whose calls these are while ``fake``, a copy of ``own``, runs."""
        for hooks in (fake._forward_hooks, fake._forward_pre_hooks):  # a user's would see fake tensors
            hooks.clear()
        op = find_equivalent_op(own)
        if op is not None:
            fake.forward = lambda x: op(fake, x)
        fake.register_forward_pre_hook(lambda module, args: self._running.append(own), prepend=True)
        fake.register_forward_hook(lambda module, args, output: self._running.pop() and None, always_call=True)

    def kept(self, module: nn.Module) -> tuple[Savers, Savers]:
        """Who keeps what the module's activations return, and what they read."""
        return self._kept(self.made[module], self._always | self._by_smooth), self._kept(
            self._read.get(module, set()), self._always
        )

    def _kept(self, storages: set[int], always: set[int]) -> Savers:
        weights = [weight for storage in storages for weight in self._weights.get(storage, ())]
        return weights, not always.isdisjoint(storages)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READ_INPUT and self._running and args:
            self._read.setdefault(self._running[-1], set()).add(self._storage_of(args[0]))
        output = self._call(func, args, kwargs or {})
        if func in _ACTIVATIONS and self._running:
            self.made.setdefault(self._running[-1], set()).add(self._storage_of(output))
        return output

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if is_in_checkpoint():
            return self._call_in_checkpoint(func, args, kwargs)
        place = _WEIGHTED.get(func, len(args))
        if place < len(args):
            self._keep_while(args[place - 1], args[place])
        elif func in _SMOOTH:
            self._by_smooth.update(self._storage_of(x) for x in args[:1])
        elif func not in _BITS and func not in _KEEP_NOTHING:
            with torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _call_in_checkpoint(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A checkpoint keeps what comes in, and nothing that is made within."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and self._storage_of(leaf) not in self._recomputed:
                self._keep(leaf)
        output = func(*args, **kwargs)
        self._recomputed.update(self._storage_of(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        return output

    def _keep_while(self, x: Tensor, weight: Any) -> None:
        original = self._originals.get(id(weight))
        if original is None:
            self._keep(x)
        else:
            self._weights.setdefault(self._storage_of(x), []).append(original)

    def _keep(self, tensor: Tensor) -> None:
        self._always.add(self._storage_of(tensor))

    def _save(self, tensor: Tensor) -> Tensor:
        self._keep(tensor)
        return tensor.detach()  # a node that saved its own output would hold itself, for ever

    def _storage_of(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        address: int = storage._cdata
        return address
