"""``skip_init``: builds a model without drawing its random values: less time and, for large parameters, less memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import Caught
from ..randomness import undisturbed
from ..task import Task

_FILLS = frozenset([torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default])
"""In-place operations that initializers draw with. Drawing GPT-2's 124 million took a third of the time of its memory
model."""
_READS = frozenset([torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape])
"""Tags of operations whose caller goes by the values: ``item()``, ``nonzero()``, ``equal()``."""


def skip_init(task: Task) -> Task:
    """The task with models whose parameters have arbitrary values, for callers that read shapes only.

    A model that reads the values that it draws is built with them, as usual.
    """
    variants = {name: partial(_build, build) for name, build in task.variants.items()}
    return replace(task, build_model=partial(_build, task.build_model), variants=variants, weights=None)


def _build(build: Callable[[], Any]) -> Any:
    with Caught(), undisturbed(), _SkipInit():  # one that looks at its values may raise anything
        return build()
    return build()


class _Looks(Exception):
    """A value was read that had not been drawn."""


class _SkipInit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Skips the drawing of values; what is computed from such tensors has no values either."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._without: set[int] = set()
        """Storages, by their address."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FILLS and args[0].is_floating_point():
            self._without.add(_storage(args[0]))
            return args[0]
        depends = bool(self._without) and any(_storage(one) in self._without for one in _tensors((args, kwargs)))
        if depends and not _READS.isdisjoint(func.tags):
            raise _Looks
        results = func(*args, **(kwargs or {}))
        if depends:
            self._without.update(map(_storage, _tensors(results)))
        return results


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
