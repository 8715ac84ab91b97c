"""``BlockChoice``: which blocks to recompute so that a micro-batch stays within a memory limit at the least cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from ...measure.profiling.allocations import Phase
from ...plan import Plan
from ...task import Task
from ...techniques.checkpointing import Checkpointing, find_blocks
from ...training.apply_plan import build_model
from ...training.skip_init import skip_init
from ..memory_model import MemoryModel, fit_memory_model
from ..tracing.fake_ops import Target
from ..tracing.work import Work
from ..types import Largest
from .block_peaks import Holders, holders_of, modules_holders, stretch_peaks
from .knapsack import cheapest

FLOPS_PER_BYTE = 10.0
"""Operations that take as long as moving a byte: of an A100 in fp32 (19.5e12 over 2.0e12 a second), and of the order of
a CPU's. It matters where some blocks compute and others move data."""
_MOST_TRIES = 4
"""Choices that are traced to check them. The first is exact where blocks' savings add up: so it is in all models tried,
but for layers of kind ``recompute``, which keep less for the layer behind them and are 5 % off."""
_MOST_LAWS = 4
"""Memory models kept at a time, since each holds its traces: of no blocks, of all blocks, and of the last choices."""


@dataclass(frozen=True)
class Places:
    """Where the modules of a task's model stand in its repeated blocks."""

    num_blocks: int
    holders: Holders

    @classmethod
    def of(cls, task: Task) -> Places:
        """The places in a model that is built for it.

        Raises:
            TaskError: ``task.blocks`` names what the model does not have.
            Exception: whatever the user's code raises.
        """
        model = build_model(skip_init(task))
        blocks = find_blocks(model, task.blocks)
        return cls(len(blocks), modules_holders(model, blocks))


class BlockChoice:
    """Chooses blocks for one combination of techniques. Its memory models serve all micro-batches and limits.

    Source: the trade is that of Checkmate, Jain et al. 2020, arXiv:1910.02653, with whole blocks as the units.
    """

    def __init__(self, places: Places, memory_model: Callable[[tuple[int, ...]], MemoryModel]) -> None:
        """
        Args:
            places: where the task's modules stand.
            memory_model: of the step where blocks are recomputed, given their numbers, ascending; asked for often.
        """
        self.memory_model = memory_model
        """The memory of the step where these blocks are recomputed."""
        self._holders, self._all = places.holders, tuple(range(places.num_blocks))

    @classmethod
    def of(
        cls, plan: Plan, task: Task, accumulates: bool = False, largest_of: Largest = 1, target: Target = "cpu"
    ) -> BlockChoice:
        """A choice with memory models of its own.

        Args:
            plan: its checkpointing and its batch do not matter.
            task: what it is applied to.
            accumulates: an optimizer step has more than one micro-batch.
            largest_of: where shapes vary, every batch repeats the largest of so many samples.
            target: the device that is planned for.

        Raises:
            TaskError: ``task.blocks`` names what the model does not have.
            Exception: whatever the user's code raises.
        """
        places = Places.of(task)

        @lru_cache(_MOST_LAWS)
        def memory_model(blocks: tuple[int, ...]) -> MemoryModel:
            settings = plan.settings.having(Checkpointing.of(blocks, places.num_blocks))
            return fit_memory_model(
                plan.model_copy(update={"settings": settings}), task, accumulates, largest_of, target
            )

        return cls(places, memory_model)

    def choose(self, micro: int, limit_bytes: int) -> tuple[int, ...] | None:
        """The blocks whose recomputation costs least, such that the tensors' peak is at most a limit.

        Args:
            micro: samples in one forward pass, >= 1.
            limit_bytes: that the choice's own memory model holds at this micro-batch.

        Returns:
            Their numbers, ascending; empty where nothing need be recomputed. None where neither all blocks nor any set
            that was found are enough.

        Raises:
            Untraceable: the training asks for values that fake tensors do not have.
        """
        if self._fits((), micro, limit_bytes):
            return ()
        if not self._all:
            return None
        stock, recomputed = self.memory_model(()).at(micro), self.memory_model(self._all).at(micro)
        peaks = stretch_peaks(stock, recomputed, self._holders, len(self._all))
        costs, changes = self._costs(micro), [peak.change_bytes for peak in peaks]
        tried: list[tuple[int, ...]] = []
        missed_bytes = 0
        for _ in range(_MOST_TRIES):
            room = [limit_bytes - missed_bytes - peak.base_bytes for peak in peaks]
            chosen = cheapest(costs, changes, room, tried)
            if chosen is None:
                break
            if self._fits(chosen, micro, limit_bytes):
                return chosen
            tried.append(chosen)
            expected = max(peak.at(chosen) for peak in peaks)
            missed_bytes = max(missed_bytes, self.memory_model(chosen).peak_bytes(micro) - expected)
        return self._all if self._fits(self._all, micro, limit_bytes) else None

    def cost(self, blocks: tuple[int, ...], micro: int) -> float:
        """What recomputing blocks adds to a step: bytes moved, with operations converted to bytes by FLOPS_PER_BYTE.

        Raises:
            Untraceable: the training asks for values that fake tensors do not have.
        """
        costs = self._costs(micro) if blocks else ()
        return sum(costs[number] for number in blocks)

    def _fits(self, blocks: tuple[int, ...], micro: int, limit_bytes: int) -> bool:
        return self.memory_model(blocks).peak_bytes(micro) <= limit_bytes

    def _costs(self, micro: int) -> list[float]:
        """The cost of recomputing each block: its work where all blocks are recomputed, less its work where none is.
        What a block need not compute again, since backward reads none of it, is not in it. Work in a module that
        several blocks share is split between them."""
        costs = [0.0] * len(self._all)
        for blocks, sign in ((self._all, 1), ((), -1)):
            for (module, _), moved in _moved_bytes(self.memory_model(blocks), micro).items():
                holders = holders_of(module, self._holders)
                for number in holders:
                    costs[number] += sign * moved / len(holders)
        return [max(0.0, cost) for cost in costs]


def _moved_bytes(memory_model: MemoryModel, micro: int) -> Mapping[tuple[str, Phase], float]:
    """The work of each module and phase as one number, at a micro-batch: interpolated between the first and the last
    traced batch."""
    if memory_model.is_traced_at_each_batch or micro < memory_model.batches[0]:
        first = last = memory_model.trace_step(micro)
        share = 0.0
    else:
        first, *_, last = memory_model.steps
        share = (micro - memory_model.batches[0]) / (memory_model.batches[-1] - memory_model.batches[0])
    places = {**first.work, **last.work}
    one, other = ({place: as_bytes(step.work.get(place, Work())) for place in places} for step in (first, last))
    return {place: one[place] + (other[place] - one[place]) * share for place in places}


def as_bytes(work: Work) -> float:
    """Work as one number: bytes moved, with operations converted by FLOPS_PER_BYTE."""
    return work.flops / FLOPS_PER_BYTE + work.num_bytes
