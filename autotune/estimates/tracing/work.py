"""``Work``: floating-point operations and bytes moved by a step, counted while it is traced.

Source: torch.utils.flop_counter, whose formulas are used; an operation that has none counts for its bytes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ...measure.profiling.allocations import Phase
from ...measure.profiling.tracer import tensors_of

aten = torch.ops.aten


class Work(NamedTuple):
    """Floating-point operations and bytes moved."""

    flops: int = 0
    """Floating-point operations of matrix products, convolutions and attention."""
    num_bytes: int = 0
    """Bytes that operations read and write, each as if nothing stayed in a cache."""

    def plus(self, other: Work) -> Work:
        """The sum of both."""
        return Work(self.flops + other.flops, self.num_bytes + other.num_bytes)


@dataclass(frozen=True)
class _Attention:
    """An attention kernel's products. Torch has no formula for the CPU's kernel, and before 2.13 none where keys have
    fewer heads."""

    count: Callable[..., int]
    first: int
    """Index of the query among the arguments."""

    def __call__(self, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
        query, key, value = (one.shape for one in args[self.first : self.first + 3])
        key, value = ((*query[:-2], *one[-2:]) for one in (key, value))  # fewer heads than the query's serve several
        return self.count(*[args[0].shape] * self.first, query, key, value)


_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    aten._scaled_dot_product_efficient_attention: _Attention(sdpa_flop_count, 0),
    aten._scaled_dot_product_efficient_attention_backward: _Attention(sdpa_backward_flop_count, 1),
    aten._scaled_dot_product_flash_attention: _Attention(sdpa_flop_count, 0),
    aten._scaled_dot_product_flash_attention_backward: _Attention(sdpa_backward_flop_count, 1),
    aten._scaled_dot_product_flash_attention_for_cpu: _Attention(sdpa_flop_count, 0),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _Attention(sdpa_backward_flop_count, 1),
}


def work_between(
    batches: tuple[int, int], steps: tuple[Mapping[tuple[str, Phase], Work], ...], batch: int
) -> tuple[Work, Work]:
    """Work of forward and backward together, and of the optimizer, interpolated between two micro-batches."""
    share = (batch - batches[0]) / (batches[1] - batches[0])
    found = []
    for first, last in zip(*map(total_work, steps), strict=True):
        flops, num_bytes = (max(0, round(a + (b - a) * share)) for a, b in zip(first, last, strict=True))
        found.append(Work(flops, num_bytes))
    return found[0], found[1]


def total_work(step: Mapping[tuple[str, Phase], Work]) -> tuple[Work, Work]:
    """Work of forward and backward together, and of the optimizer."""
    found = [Work(), Work()]
    for (_, phase), work in step.items():
        is_optimizer = phase == Phase.OPTIMIZER
        found[is_optimizer] = found[is_optimizer].plus(work)
    return found[0], found[1]


class WorkCounter:
    """Adds up operations by the module and the phase that they run in.

    When a memory-saving layer loops over pieces of a tensor, a fake-tensor step runs the first turn alone, so that its
    work is counted too low.
    """

    def __init__(self) -> None:
        self.by_place: dict[tuple[str, Phase], Work] = {}
        """Work by module and phase."""

    def __call__(self, func: Any, args: Any, kwargs: dict[str, Any], results: Any, place: tuple[str, Phase]) -> None:
        """Count an operation that has just run."""
        if func.is_view or func.namespace == "prim":  # asks a tensor what it is, such as its device
            return
        formula = _FORMULAS.get(func.overloadpacket)
        flops = formula(*args, **kwargs, out_val=results) if formula is not None else 0
        num_bytes = sum(map(_num_bytes, tensors_of((args, kwargs, results))))
        self.by_place[place] = self.by_place.get(place, Work()).plus(Work(flops, num_bytes))


def _num_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
