"""``Accumulation``: tells which additions torch computes in place, and which gradients it writes in place, although a
dispatch mode sees them as new tensors."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...internals.fake_tensors import unset_fake_temporarily
from ...measure.profiling.tracer import tensors_of

ADD = torch.ops.aten.add.Tensor
_aten = torch.ops.aten
SCATTERS = frozenset(
    {
        _aten.index_add.default, _aten.index_put.default, _aten.put.default, _aten.scatter.src,
        _aten.scatter_add.default,
    }
)  # fmt: skip
"""What backward formulas write gradients of selected elements with, into zeros that they have made."""


class Accumulation:
    """Follows the operations of one step in order, and tells for each addition whether torch would do it in place.

    Autograd adds up the gradients of a tensor that is used several times. It adds into the first of them if nothing
    else refers to that one. The backward formula of a node adds too, into what it has made itself, unless two of its
    gradients belong to one tensor. A linear layer adds its bias into the product where its input is not contiguous.

    Source: torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace; aten/src/ATen/native/Linear.cpp, linear.
    """

    def __init__(self) -> None:
        self._unshared = _references_where_unshared()
        self._node: Any = None
        """At work; held, so that it is known again."""
        self._made: set[int] = set()
        """Storages of what it has made."""

    def is_in_place(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether torch computes this addition in place of its first argument."""
        if kwargs or not all(isinstance(one, Tensor) for one in args) or args[0].dtype != args[1].dtype:
            return False
        if _references(args) != self._unshared or not torch.ops.aten.is_non_overlapping_and_dense(args[0]):
            return False
        if args[0].dim() > 2 and args[1].shape == args[0].shape[-1:]:
            return True
        node = torch._C._current_autograd_node()
        if node is None or torch.is_grad_enabled() or args[0].shape != args[1].shape:
            return False
        is_its_own = node is self._node and args[0].untyped_storage()._cdata in self._made
        return not is_its_own or _gives_twice(node)

    def is_into_its_own(self, args: Any) -> bool:
        """Whether a backward formula of torch's writes into what it has made itself. Only where a dispatch mode looks
        on does it make another tensor of it.

        Source: aten/src/ATen/native/TensorAdvancedIndexing.cpp, gather_backward; ReduceOps.cpp,
        value_selecting_reduction_backward_symint; aten/src/ATen/TensorSubclassLikeUtils.h, areAnyTensorSubclassLike.
        """
        node = torch._C._current_autograd_node()
        if node is None or node is not self._node or isinstance(node, torch.autograd.function.BackwardCFunction):
            return False
        return args[0].untyped_storage()._cdata in self._made

    def note(self, results: Any) -> None:
        """Take in what an operation returned."""
        node = torch._C._current_autograd_node()
        if node is not self._node:
            self._node, self._made = node, set()
        if node is not None:
            dense = (one for one in tensors_of(results) if one.layout is torch.strided)
            self._made.update(one.untyped_storage()._cdata for one in dense)


def _gives_twice(node: Any) -> bool:
    to = [function for function in node.next_functions if function[0] is not None]
    return len(set(to)) < len(to)


def _references(args: Any) -> tuple[int, int, int]:
    """Reference counts of the first argument: of the tensor, of its Python object and of its storage."""
    storage = args[0].untyped_storage()
    return args[0]._use_count(), sys.getrefcount(args[0]), torch._C._storage_Use_Count(storage._cdata)


@cache
def _references_where_unshared() -> tuple[int, int, int] | None:
    """The counts of :func:`_references` in a sum of two gradients that nothing else refers to; None where torch does
    not count."""
    found: list[tuple[int, int, int]] = []

    class Counts(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is ADD:
                found.append(_references(args))
            return func(*args, **(kwargs or {}))

    with unset_fake_temporarily(), torch.enable_grad():
        x = torch.ones(2, requires_grad=True) * 1
        loss = (x * x.detach()).sum() - (x * x.detach()).sum()
        try:
            with Counts():  # type: ignore[no-untyped-call]
                loss.backward()  # type: ignore[no-untyped-call]
        except AttributeError:
            return None
    return found[0]
