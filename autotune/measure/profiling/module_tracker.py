"""Module tracker: which module is running, in forward by global module hooks, in backward by the autograd node.

Autograd numbers its nodes as they are made. So the numbers at which a module was entered and left tell in which
module's forward a node was made. Neither the graph nor what it keeps is touched.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ...errors import AutotuneError
from ...internals import lost
from ...layers.graph import is_in_checkpoint
from .allocations import OUTSIDE

_ACCUMULATE = "torch::autograd::AccumulateGrad"


class _Place(NamedTuple):
    """Where a node was made."""

    module: str
    recomputed: str
    """The module that a checkpoint around it recomputes; ``module`` itself without a checkpoint."""


class _Entered(NamedTuple):
    module: nn.Module
    place: _Place
    in_backward: bool
    """Whether a node was running: its recomputation."""


_NOWHERE = _Place(OUTSIDE, OUTSIDE)


class Whereabouts:
    """Follows the running module. Use as a context, within which its hooks are registered.

    A module with several names goes by the first. A reentrant checkpoint on a CUDA device recomputes in a thread that
    numbers its nodes anew, so that its backward counts to the wrong module.
    """

    def __init__(self, model: nn.Module, on_switch: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            model: whose modules are told apart; all others belong to the one that calls them.
            on_switch: called after each entering and leaving of a module.

        Raises:
            AutotuneError: this torch does not tell which node runs.
        """
        if (reason := lost("profile")) is not None:
            raise AutotuneError(f"steps cannot be traced: {reason}")
        self.order: dict[str, None] = {}
        """Names of the modules that ran, in the order in which they were first entered."""
        self._names = {module: name for name, module in model.named_modules()}
        self._owners = _owners(model)
        self._on_switch = on_switch
        self._stack: list[_Entered] = []
        self._numbers: list[int] = []
        self._places: list[_Place] = []
        self._thread = threading.get_ident()
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),  # a checkpoint stops its recomputation early
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def path(self) -> tuple[nn.Module, ...]:
        """The modules whose forward is running, from the outside in."""
        return tuple(entered.module for entered in self._stack)

    def now(self) -> tuple[str, bool]:
        """The module that runs, or whose backward runs, and whether backward is running."""
        node = torch._C._current_autograd_node()
        if node is None:
            return (self._stack[-1].place.module if self._stack else OUTSIDE), False
        if self._stack and self._stack[-1].in_backward:
            return self._stack[-1].place.module, True
        return self.of_node(node, recomputing=torch.is_grad_enabled()), True

    def of_node(self, node: Any, recomputing: bool = False) -> str:
        """The module in whose forward an autograd node was made, or that owns the parameter it accumulates into.

        Args:
            node: a ``grad_fn``.
            recomputing: name the module that the checkpoint around it recomputes.
        """
        if node.name() == _ACCUMULATE:
            return self.owner(node.variable)
        at = bisect_right(self._numbers, node._sequence_nr()) - 1
        place = self._places[at] if at >= 0 else _NOWHERE
        return place.recomputed if recomputing else place.module

    def owner(self, parameter: Tensor) -> str:
        """The first module that holds a parameter or buffer; OUTSIDE for others."""
        return self._owners.get(id(parameter), OUTSIDE)

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(module)
        above = self._stack[-1] if self._stack else None
        if name is None:  # a loss's own module, or one that the forward builds
            name = above.place.module if above else OUTSIDE
        else:
            self.order.setdefault(name)
        recomputed = above.place.recomputed if above and is_in_checkpoint() else name
        node = torch._C._current_autograd_node()
        self._stack.append(_Entered(module, _Place(name, recomputed), node is not None))
        self._switch()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._stack and self._stack.pop().module is not module:
            pass
        self._switch()

    def _switch(self) -> None:
        if threading.get_ident() == self._thread:
            self._numbers.append(torch._C._autograd._get_sequence_nr())
            self._places.append(self._stack[-1].place if self._stack else _NOWHERE)
        self._on_switch()


def _owners(model: nn.Module) -> dict[int, str]:
    """Names of modules by the id of each parameter and buffer that they hold."""
    owners: dict[int, str] = {}
    for name, module in model.named_modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            owners.setdefault(id(tensor), name)
    return owners
