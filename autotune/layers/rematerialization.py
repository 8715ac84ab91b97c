"""Recomputes a layer's output from tensors that autograd already saves, so that the next layer need not keep it.

A producer (a normalisation, GELU) notes on its autograd node how its output follows from what its own backward needs. A
consumer (linear, convolution) that would keep that output saves those tensors instead, which costs nothing, since they
are kept already, and computes the output again in backward. Tensors are noted weakly: what the graph does not keep is
gone by then, and the consumer keeps its input as stock torch does. A sum in a residual stream is computed again from
parts of which one is, a few blocks far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from .graph import is_in_checkpoint, notes_of
from .sites import Site

_KEY = "autotune.rematerialization"
_KEPT = "autotune.kept"
_FARTHEST = 4
"""Sums in a row that are computed again before one is kept: what is computed lies in memory together."""


class Unchanged:
    """A tensor, noted weakly: gone too once it has been changed in place."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = TensorWeakRef(tensor), tensor._version

    def __call__(self) -> Tensor | None:
        """The tensor; None where it is gone."""
        tensor: Tensor | None = self._tensor()
        return tensor if tensor is not None and tensor._version == self._version else None


class Remat:
    """Rematerialization of a tensor: how it is computed from tensors that are kept anyway, and from other such ones."""

    def __init__(
        self,
        compute: Callable[..., Tensor],
        *parts: Tensor | Remat | None,
        overwriting: Callable[..., Tensor] | None = None,
        is_view: bool = False,
        num_sums: int = 0,
    ) -> None:
        """``compute`` gets the parts' values in order; a part that is None stays None.

        ``overwriting`` does the same within its first argument, and is called where nobody else reads that.
        """
        self._compute = compute
        self._overwriting = overwriting
        self._is_view = is_view
        self.num_sums: int = num_sums + max((part.num_sums for part in parts if isinstance(part, Remat)), default=0)
        """Residual sums in a row that are computed again."""
        self._parts = [Unchanged(part) if isinstance(part, Tensor) else part for part in parts]
        self._num_waiting = 0
        self._is_shared = False
        self._value: Tensor | None = None

    def hold(self) -> tuple[Tensor, ...] | None:
        """What a consumer has to save to :meth:`build` the tensor in its backward; None where some of it is gone."""
        tensors = [tensor for tensor in self._tensors() if tensor is not None]
        if len(tensors) < sum(1 for _ in self._tensors()):
            return None
        self._await()
        return tuple(tensors)

    def build(self, tensors: Sequence[Tensor]) -> Tensor:
        """The tensor again, from what :meth:`hold` returned. It stays until every holder has had it."""
        return self._build(iter(tensors))

    def _tensors(self) -> Iterator[Tensor | None]:
        for part in self._parts:
            if isinstance(part, Remat):
                yield from part._tensors()
            elif part is not None:
                yield part()

    def _await(self) -> None:
        self._num_waiting += 1
        self._is_shared |= self._num_waiting > 1
        if self._num_waiting == 1:  # it is computed once for all who wait, and so are its parts for it
            for part in self._parts:
                if isinstance(part, Remat):
                    part._await()

    def _build(self, tensors: Iterator[Tensor]) -> Tensor:
        value = self._value
        if value is None:
            values = [self._value_of(part, tensors) for part in self._parts]
            first = self._parts[0]
            is_free = isinstance(first, Remat) and not first._is_shared and not first._is_view
            value = (self._overwriting if self._overwriting is not None and is_free else self._compute)(*values)
        else:
            for _ in self._tensors():
                next(tensors)
        self._num_waiting -= 1
        if self._num_waiting > 0 and self._value is None:
            self._value = value
            # Of those who wait, some may belong to what this backward does not reach.
            torch.autograd.Variable._execution_engine.queue_callback(self._drop)
        elif self._num_waiting <= 0:
            self._value = None
        return value

    def _drop(self) -> None:
        self._value = None

    @staticmethod
    def _value_of(part: Any, tensors: Iterator[Tensor]) -> Tensor | None:
        if part is None:
            return None
        return part._build(tensors) if isinstance(part, Remat) else next(tensors)


def publish(output: Tensor, compute: Callable[..., Tensor], *parts: Tensor | Remat | None, **options: Any) -> Tensor:
    """Note on ``output``'s node that it is ``compute(*parts)``, a :class:`Remat` of these ``options``; returns it."""
    if output.grad_fn is not None:
        notes_of(output.grad_fn)[_KEY, output.output_nr] = Remat(compute, *parts, **options), output._version
    return output


def note_kept(x: Tensor, kept: Tensor | None = None) -> Tensor:
    """Note on ``x``'s node that the graph keeps ``x`` whole, as ``kept`` if not as itself; returns ``x``."""
    notes_of(x.grad_fn)[_KEPT, x.output_nr] = Unchanged(x if kept is None else kept)
    return x


def find(x: Tensor) -> Remat | None:
    """How to compute ``x``, or what it is a view of, again; None if nothing is noted, or if it was changed since.

    None of a view as another type. None within a checkpoint: there the tensors are not kept, and recomputation has to
    save as many as the forward did.
    """
    base = x if x._base is None else x._base
    remat, version = notes_of(base.grad_fn).get((_KEY, base.output_nr), (None, 0))
    if remat is None or version != base._version or x.dtype != base.dtype or is_in_checkpoint():
        return None
    return remat if base is x else _view_of(remat, base, x)


def part_of(x: Tensor) -> Tensor | Remat | None:
    """``x`` as a part of another: its own :class:`Remat`, or the tensor if it is kept anyway; else None."""
    remat = find(x)
    if remat is not None:
        return remat
    kept = notes_of(x.grad_fn).get((_KEPT, x.output_nr)) if x._base is None and not is_in_checkpoint() else None
    return None if kept is None else kept()


def hold(x: Tensor) -> tuple[Remat | None, tuple[Tensor, ...]]:
    """How ``x`` is rematerialized, and what to save for that; (None, ()) if ``x`` itself has to be kept."""
    remat = find(x)
    kept = remat.hold() if remat is not None else None
    return (None, ()) if kept is None else (remat, kept)


def _view_of(remat: Remat, base: Tensor, x: Tensor) -> Remat:
    size, stride, offset, layout = x.size(), x.stride(), x.storage_offset(), base.stride()

    def view(value: Tensor) -> Tensor:
        if value.stride() != layout:
            value = torch.empty_strided(value.size(), layout, dtype=value.dtype, device=value.device).copy_(value)
        return value.as_strided(size, stride, offset)

    return Remat(view, remat, is_view=True)


def add(function: Callable[..., Any]) -> Callable[..., Any]:
    """``x + y``, in place or not."""

    def replacement(site: Site, input: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        parts = _parts(input, other) if site.recomputes and not args and not kwargs else None
        output = function(input, other, *args, **kwargs)
        if parts is None or (output is input and isinstance(parts[0], Tensor)):  # what was kept is the sum now
            return output
        if max(part.num_sums for part in parts if isinstance(part, Remat)) >= _FARTHEST:
            return output
        return publish(output, torch.add, *parts, overwriting=Tensor.add_, num_sums=1)

    return replacement


def _parts(x: Any, y: Any) -> tuple[Tensor | Remat, Tensor | Remat] | None:
    """How both are rematerialized, or kept anyway; None if one is lost, both are kept, or the sum would broadcast."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape and x.dtype == y.dtype):
        return None
    first, second = part_of(x), part_of(y)
    is_possible = isinstance(first, Remat) or isinstance(second, Remat)
    return (first, second) if first is not None and second is not None and is_possible else None
