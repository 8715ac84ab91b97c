"""``ProcessChoice``: which blocks to recompute so that the whole process stays within a memory limit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ...techniques import Settings
from ...techniques.checkpointing import Checkpointing
from ..memory_model import MemoryModel
from ..predictor import Predictor
from ..tracing.fake_step import Untraceable
from ..types import Interval
from .block_choice import BlockChoice, Places

_MOST_TRIES = 3
"""Attempts; each takes what the allocator added in the one before."""


class ProcessChoice:
    """Chooses for one combination of techniques, at any micro-batch and with any allocator."""

    def __init__(self, places: Places, predictor: Callable[[Checkpointing], Predictor]) -> None:
        """
        Args:
            places: where the task's modules stand.
            predictor: of the combination with this checkpointing; asked for often.
        """
        self._places, self._predictor = places, predictor
        self._all = tuple(range(places.num_blocks))

    def choose(
        self, settings: Settings, micro: int, limit_bytes: int, counts: Callable[[Interval], int]
    ) -> tuple[int, ...] | None:
        """The blocks whose recomputation costs least, such that the process stays within a limit.

        Args:
            settings: whose allocator it is.
            micro: samples in one forward pass, >= 1.
            limit_bytes: what the process may be charged.
            counts: of the interval of what it is charged, what is held against the limit.

        Returns:
            Their numbers, ascending; empty where nothing need be recomputed, None where recomputing all is not enough.

        Raises:
            Untraceable: the step was probed, which does not tell what each block keeps.
        """

        @cache
        def takes(blocks: tuple[int, ...]) -> int:
            return counts(self._of(blocks).process(micro, settings))

        def memory_model(blocks: tuple[int, ...]) -> MemoryModel:
            found = self._of(blocks).memory_model(micro)
            if not isinstance(found.memory_model, MemoryModel):
                raise Untraceable(found.reason or "")
            return found.memory_model

        def added(blocks: tuple[int, ...]) -> float:
            """What the process is charged beyond the base, over the tensors' peak."""
            return (takes(blocks) - base_bytes) / memory_model(blocks).peak_bytes(micro)

        if takes(()) <= limit_bytes:
            return ()
        if not self._all or takes(self._all) > limit_bytes:
            return None
        base_bytes = self._of(self._all).base_bytes
        choice = BlockChoice(self._places, memory_model)
        factor = min(added(()), added(self._all))
        for _ in range(_MOST_TRIES):
            chosen = choice.choose(micro, int((limit_bytes - base_bytes) / factor))
            if chosen is None:
                break
            if takes(chosen) <= limit_bytes:
                return chosen
            factor = added(chosen)
        return self._all

    def _of(self, blocks: tuple[int, ...]) -> Predictor:
        return self._predictor(Checkpointing.of(blocks, self._places.num_blocks))
