"""By which batch sizes other tools go: each rule as the sizes in the order of the rule's preference.

Their rules stop at an out-of-memory error. On a CPU there is none at a budget: here a size fits by its measured peak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_LARGEST = 4096
"""The last that Lightning tries: 8192 ends its search untried."""


def auto_find_sizes(start: int) -> tuple[int, ...]:
    """Of ``TrainingArguments(auto_find_batch_size=True)``: the job's own, then nine tenths of it, and so on down to 1.

    Source: ``accelerate.utils.find_executable_batch_size`` of accelerate 1.15.0.
    """
    sizes = [start]
    while sizes[-1] > 1:
        sizes.append(int(sizes[-1] * 0.9))
    return tuple(sizes)


def power_sizes(length: int) -> tuple[int, ...]:
    """Of ``Tuner(trainer).scale_batch_size(model)``, the largest first: doubled from 2 until memory runs out or the
    dataset's ``length`` is reached, then halved once; 1 where 2 does not fit.

    Source: ``_run_power_scaling`` of Lightning 2.6.6.
    """
    sizes = [1, 2]
    while sizes[-1] < min(length, _LARGEST):
        sizes.append(2 * sizes[-1])
    return tuple(reversed(sizes))


def first_that_fits(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The first that fits, by bisection: what fits at one size fits at every smaller one. None where none does.

    Args:
        sizes: descending.
        fits: measures.
    """
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(sizes[middle]) else (middle + 1, high)
    return sizes[low] if low < len(sizes) else None
