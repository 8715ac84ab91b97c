"""``ProcessChoice``: what to do in which blocks, and with the whole, for the process to stay within a memory limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache

from ...techniques import Settings, Technique
from ...techniques.checkpointing import Checkpointing
from ..memory_model import MemoryModel
from ..predictor import Predictor
from ..tracing.fake_step import Untraceable
from ..types import COUNTED, Interval, TimeLaw
from .block_choice import BlockChoice, Places
from .variables import Variables

_MOST_TRIES = 3
"""Attempts; each takes what the allocator added in the one before."""


class ProcessChoice:
    """Chooses for one combination of techniques, at any micro-batch and with any allocator."""

    def __init__(
        self,
        places: Places,
        predictor: Callable[[Settings], Predictor],
        choices: tuple[Technique, ...] = (Checkpointing(kind="blocks"),),
        law: TimeLaw = COUNTED,
    ) -> None:
        """
        Args:
            places: where the task's modules stand.
            predictor: of the combination with settings chosen for it; asked for often.
            choices: what is chosen from, of techniques that add up, as it is everywhere.
            law: of the time that work takes.
        """
        self._places, self._predictor, self._choices, self._law = places, predictor, choices, law

    def choose(
        self,
        settings: Settings,
        micro: int,
        limit_bytes: int,
        counts: Callable[[Interval, Settings], int],
        most_s: float = math.inf,
    ) -> Settings | None:
        """The settings that cost least, such that the process stays within a limit.

        Args:
            settings: of the combination, whose allocator it is; what they have of what is chosen does not matter.
            micro: samples in one forward pass, >= 1.
            limit_bytes: what the process may be charged.
            counts: of the interval of what it is charged with some choice, what is held against the limit.
            most_s: seconds from which on a choice is not looked at.

        Returns:
            The settings as they are where nothing need be done, None where what takes least is not enough.

        Raises:
            Slower: the cheapest adds that many seconds.
            Untraceable: the step was probed, which does not tell what each block keeps.
        """
        plain = settings.having(*(type(one)() for one in self._choices))

        @cache
        def takes(chosen: Settings) -> int:
            return counts(self._predictor(chosen).process(micro, settings), chosen)

        base_bytes = self._predictor(plain).base_bytes

        def added(chosen: Settings) -> float:
            """What the process is charged beyond the base, what the choice loads included, over the tensors' peak. Once
            it is known of a choice that takes too much, the limit for tensors is below that choice's."""
            return (takes(chosen) - base_bytes) / self._traced(chosen, micro).peak_bytes(micro)

        if takes(plain) <= limit_bytes:
            return plain
        choice = self.of(plain, micro)
        factor = min(map(added, choice.everywhere))
        for _ in range(_MOST_TRIES):
            chosen = choice.choose(micro, int((limit_bytes - base_bytes) / factor), most_s)
            if chosen is None:
                break
            if takes(chosen) <= limit_bytes:
                return chosen
            factor = added(chosen)
        fitting = (one for one in choice.smallest(micro) if takes(one) <= limit_bytes)
        return min(fitting, key=lambda one: choice.cost(one, micro), default=None)

    def everywhere(self, settings: Settings) -> Iterator[Settings]:
        """Each combination of what is chosen from, everywhere."""
        plain = settings.having(*(type(one)() for one in self._choices))
        return Variables(self._choices, self._places.num_blocks).everywhere(plain)

    def of(self, plain: Settings, micro: int) -> BlockChoice:
        """The choice by the tensors' peak alone.

        Raises:
            Untraceable: by :meth:`BlockChoice.choose`: the step was probed.
        """
        return BlockChoice(
            self._places, lambda settings: self._traced(settings, micro), plain, self._choices, self._law
        )

    def _traced(self, settings: Settings, micro: int) -> MemoryModel:
        found = self._predictor(settings).memory_model(micro)
        if not isinstance(found.memory_model, MemoryModel):
            raise Untraceable(found.reason or "")
        return found.memory_model
