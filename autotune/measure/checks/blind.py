"""Does ``evaluate`` see the model that it is given, and does it draw random numbers?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ...errors import TaskError
from ...randomness import seed_everything, undisturbed
from .scores import Judged

_SEEDS = (1, 2)


def noise_of(judge: Callable[[], Judged]) -> float:
    """How far two judgements of one model are apart that draw other random numbers."""
    one, other = (_seeded(judge, seed) for seed in _SEEDS)
    return abs(one.value - other.value)


def check_sees(model: nn.Module, judge: Callable[[], Judged], where: str) -> None:
    """Refuse an evaluation that says of a damaged model what it says of the whole one, however it is damaged: it would
    say so of any other, too.

    Args:
        model: what ``judge`` judges; its weights are afterwards what they were before, bit for bit.
        judge: evaluates it.
        where: names ``evaluate``.

    Raises:
        TaskError: so it is.
    """
    whole, is_damaged = _seeded(judge, _SEEDS[0]), False
    for damage in _DAMAGES:
        with _damaged(model, *damage) as is_other:
            try:
                if is_other and _seeded(judge, _SEEDS[0]) != whole:
                    return
            except TaskError:  # it raises, or returns NaN: it has seen it
                return
        is_damaged |= is_other
    if not is_damaged:
        return
    raise TaskError(
        f"{where} returned {whole.value:.6g} for the trained model, and the very same with its weights turned upside "
        "down: it does not see the model that it is given. Evaluate the argument, not a model of the file's own."
    )


def _seeded(judge: Callable[[], Judged], seed: int) -> Judged:
    with undisturbed():
        seed_everything(seed)
        return judge()


def _turn(values: torch.Tensor) -> torch.Tensor:
    return values.flip(0).neg()


def _shift(values: torch.Tensor) -> torch.Tensor:
    return values.roll(len(values) // 2 + 1)


def _shift_back(values: torch.Tensor) -> torch.Tensor:
    return values.roll(-(len(values) // 2 + 1))


_DAMAGES = ((_turn, _turn), (_shift, _shift_back))
"""Each with what undoes it."""
Change = Callable[[torch.Tensor], torch.Tensor]


@contextmanager
def _damaged(model: nn.Module, damage: Change, undo: Change) -> Iterator[bool]:
    """Weights are changed meanwhile, in place: whether any is another then."""
    changed: list[nn.Parameter] = []
    is_other = False
    try:
        for weight in model.parameters():
            if weight.is_floating_point():
                is_other |= _change(weight, damage)
                changed.append(weight)
        yield is_other
    finally:
        for weight in changed:
            _change(weight, undo)


def _change(weight: torch.Tensor, change: Change) -> bool:
    with torch.no_grad():
        found = change(weight.detach().flatten()).view_as(weight)
        is_other = not torch.equal(found, weight)
        weight.copy_(found)
    return is_other
