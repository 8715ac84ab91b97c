"""How many samples of an optimizer step a rank on each of several unlike devices takes, so that all finish together."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Timed(NamedTuple):
    """A micro-batch that was measured on a device."""

    micro: int
    """Samples, >= 1."""
    seconds: float
    """That its forward and backward pass take, with its part of the optimizer's step."""

    def seconds_for(self, num_samples: int) -> float:
        """Of so many samples: a smaller last micro-batch is taken for a whole one, which was measured."""
        return -(-num_samples // self.micro) * self.seconds


def quickest(timed: Sequence[Timed], num_samples: int) -> Timed:
    """What takes so many samples in the least time; of several, the largest micro-batch."""
    return min(timed, key=lambda one: (one.seconds_for(num_samples), -one.micro))


def share_out(types: Sequence[Sequence[Timed]], num_samples: int, ranks: Sequence[int] = ()) -> list[int]:
    """Samples for a rank on each type of device, 1 or more, so that the last to finish finishes first of all ways to
    share them.

    Time is a step function of samples, so that the best last finish is one of its values: the least at which all
    ranks together take as many samples, found by bisection.

    Args:
        types: what was measured on each type of device.
        num_samples: in an optimizer step, of all ranks.
        ranks: on each type, which take as many samples each; 1 of each where nothing is said.

    Returns:
        In the order of ``types``; times ``ranks`` they add up to ``num_samples``. What is left to choose goes by
        time: a rank that would finish last gives away first.

    Raises:
        ValueError: fewer samples than ranks, or nothing was measured on a type, or ranks of one type would have to
            take unequal numbers.
    """
    ranks = ranks or [1] * len(types)
    if num_samples < sum(ranks) or not all(types):
        raise ValueError(f"{num_samples} samples cannot be shared by {sum(ranks)} ranks")
    first = max(quickest(timed, 1).seconds for timed in types)  # none takes less than this for a sample
    finishes = sorted(
        {finish for timed in types for one in timed for finish in _finishes(one, num_samples) if finish >= first}
    )

    def together(limit_s: float) -> int:
        return sum(_most(timed, limit_s) * num for timed, num in zip(types, ranks, strict=True))

    limit_s = finishes[bisect_left(finishes, num_samples, key=together)]
    counts = [min(_most(timed, limit_s), num_samples // num) for timed, num in zip(types, ranks, strict=True)]
    while over := sum(count * num for count, num in zip(counts, ranks, strict=True)) - num_samples:
        able = [number for number, count in enumerate(counts) if count > 1 and ranks[number] <= over]
        if not able:
            raise ValueError(f"{num_samples} samples cannot be shared so that ranks on one type take as many each")
        last = max(able, key=lambda number: (_least_s(types[number], counts[number]), counts[number]))
        counts[last] -= min(over // ranks[last], _last_piece(types[last], counts[last]))
    return counts


def _finishes(one: Timed, num_samples: int) -> Iterator[float]:
    return (passes * one.seconds for passes in range(1, -(-num_samples // one.micro) + 1))


def _most(timed: Sequence[Timed], limit_s: float) -> int:
    """Samples that a device takes within so many seconds."""
    return max(int(limit_s / one.seconds * (1 + 1e-12)) * one.micro for one in timed)


def _least_s(timed: Sequence[Timed], num_samples: int) -> float:
    return quickest(timed, num_samples).seconds_for(num_samples)


def _last_piece(timed: Sequence[Timed], num_samples: int) -> int:
    """Samples without which a device is done sooner; all but one where it never is."""
    one = quickest(timed, num_samples)
    return min(num_samples - (-(-num_samples // one.micro) - 1) * one.micro, num_samples - 1)
