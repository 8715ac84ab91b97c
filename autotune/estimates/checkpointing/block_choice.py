"""``BlockChoice``: what to do in which blocks, and with the whole, so that a micro-batch stays within a memory limit at
the least cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ...measure.profiling.allocations import Phase
from ...plan import Plan
from ...task import Task
from ...techniques import Settings, Technique
from ...techniques.checkpointing import Checkpointing, find_blocks
from ...techniques.offload import Offload
from ...training.apply_plan import build_model
from ...training.skip_init import skip_init
from ..memory_model import MemoryModel, fit_memory_model
from ..time_law import moved_seconds, page_seconds, seconds
from ..tracing.fake_ops import Target
from ..tracing.work import Work
from ..types import COUNTED, Largest, TimeLaw
from .block_peaks import Holders, holders_of, modules_holders, stretch_peaks
from .knapsack import cheapest, smallest
from .variables import Variables, Way

_MOST_TRIES = 4
"""Choices that are traced to check them. The first is exact where savings add up: so they do in all models tried, but
for layers of kind ``recompute``, which keep less for the layer behind them and are 5 % off."""
_MOST_LAWS = 12
"""Memory models kept at a time, since each holds its traces: of each way everywhere, and of the last choices."""


class Slower(Exception):
    """Whatever fits adds more time than is allowed."""


@dataclass(frozen=True)
class Places:
    """Where the modules of a task's model stand in its repeated blocks, and what trains."""

    num_blocks: int
    holders: Holders
    trained: tuple[int, ...] = ()
    """Elements of each parameter that does."""

    @classmethod
    def of(cls, task: Task) -> Places:
        """The places in a model that is built for it.

        Raises:
            TaskError: ``task.blocks`` names what the model does not have.
            Exception: whatever the user's code raises.
        """
        model = build_model(skip_init(task))
        blocks = find_blocks(model, task.blocks)
        trained = tuple(one.numel() for one in model.parameters() if one.requires_grad)
        return cls(len(blocks), modules_holders(model, blocks), trained)


class BlockChoice:
    """Chooses by one mixed-integer program. Its memory models serve all micro-batches and limits.

    Source: the trade is that of Checkmate, Jain et al. 2020, arXiv:1910.02653, with whole blocks as the units.
    """

    def __init__(
        self,
        places: Places,
        memory_model: Callable[[Settings], MemoryModel],
        plain: Settings,
        choices: tuple[Technique, ...],
        law: TimeLaw = COUNTED,
    ) -> None:
        """
        Args:
            places: where the task's modules stand.
            memory_model: of a step with settings; asked for often.
            plain: settings of which nothing is chosen yet.
            choices: what is chosen from, of techniques that add up, as it is everywhere.
            law: of the time that work takes.
        """
        self.memory_model = memory_model
        """The memory of a step with settings."""
        self.variables = Variables(choices if places.num_blocks else _without_blocks(choices), places.num_blocks)
        self._places, self._plain, self._law = places, plain, law

    @classmethod
    def of(
        cls,
        plan: Plan,
        task: Task,
        accumulates: bool = False,
        largest_of: Largest = 1,
        target: Target = "cpu",
        choices: tuple[Technique, ...] = (Checkpointing(kind="blocks"),),
    ) -> BlockChoice:
        """A choice with memory models of its own.

        Args:
            plan: its settings of what is chosen, and its batch, do not matter.
            task: what it is applied to.
            accumulates: an optimizer step has more than one micro-batch.
            largest_of: where shapes vary, every batch repeats the largest of so many samples.
            target: the device that is planned for.
            choices: what is chosen from.

        Raises:
            TaskError: ``task.blocks`` names what the model does not have.
            Exception: whatever the user's code raises.
        """

        @lru_cache(_MOST_LAWS)
        def memory_model(settings: Settings) -> MemoryModel:
            return fit_memory_model(
                plan.model_copy(update={"settings": settings}), task, accumulates, largest_of, target
            )

        plain = plan.settings.having(*(type(one)() for one in choices))
        return cls(Places.of(task), memory_model, plain, choices)

    @property
    def everywhere(self) -> list[Settings]:
        """The plain settings, and each way everywhere: what the program is made from."""
        return [self._plain, *(self._plain.having(*way) for way in self.variables.steps)]

    def choose(self, micro: int, limit_bytes: int, most_s: float = math.inf) -> Settings | None:
        """The settings that cost least, such that the tensors' peak is at most a limit.

        Args:
            micro: samples in one forward pass, >= 1.
            limit_bytes: that the choice's own memory model holds at this micro-batch.
            most_s: seconds from which on a choice is not looked at.

        Returns:
            The plain ones where nothing need be done. None where neither what takes least nor anything that was found
            is enough.

        Raises:
            Slower: the cheapest adds that many seconds.
            Untraceable: the training asks for values that fake tensors do not have.
        """
        if self._fits(self._plain, micro, limit_bytes):
            return self._plain
        if not self.variables.places:
            return None
        base, changes = self.rows(micro)
        costs, rules = self.costs(micro), self.variables.rules
        tried: list[tuple[int, ...]] = []
        for _ in range(_MOST_TRIES):
            chosen = cheapest(costs, changes, limit_bytes - base, tried, rules)
            if chosen is None:
                break
            if sum(costs[number] for number in chosen) >= most_s:
                raise Slower
            settings = self.variables.settings(self._plain, chosen)
            if self._fits(settings, micro, limit_bytes):
                return settings
            tried.append(chosen)
            expected = float((base + changes[:, list(chosen)].sum(axis=1)).max())
            missed_bytes = max(0.0, self.memory_model(settings).peak_bytes(micro) - expected)
            outside = next((number for number in chosen if self.variables.is_outside(number)), None)
            if outside is None:
                base = base + missed_bytes
            else:  # of layers, a block's keep less for another's: what has none of that kind is as foreseen
                changes[:, outside] += missed_bytes
        fitting = (settings for settings in self.smallest(micro) if self._fits(settings, micro, limit_bytes))
        return min(fitting, key=lambda settings: self.cost(settings, micro), default=None)

    def smallest(self, micro: int) -> list[Settings]:
        """Of these the one that takes least may take least of all: each way everywhere, and what the program finds.

        Raises:
            Untraceable: the training asks for values that fake tensors do not have.
        """
        found = smallest(*self.rows(micro), self.variables.rules) if self.variables.places else None
        return [*self.everywhere, *([] if found is None else [self.variables.settings(self._plain, found)])]

    def cost(self, settings: Settings, micro: int) -> float:
        """Seconds that settings add to a step, by the law.

        Raises:
            Untraceable: the training asks for values that fake tensors do not have.
        """
        chosen = self.variables.chosen(settings)
        costs = self.costs(micro) if chosen else []
        return sum(costs[number] for number in chosen)

    def _fits(self, settings: Settings, micro: int, limit_bytes: int) -> bool:
        return self.memory_model(settings).peak_bytes(micro) <= limit_bytes

    def rows(self, micro: int) -> tuple[np.ndarray, np.ndarray]:
        """(stretches,): bytes as it stands; and (stretches, unknowns): what each adds."""
        stock, *steps = (self.memory_model(settings).at(micro) for settings in self.everywhere)
        peaks = stretch_peaks(stock, steps, self._places.holders, self.variables.num_blocks)
        columns = [
            peaks.whole[step] if block == -1 else peaks.changes[step, :, block] for step, block in self.variables.places
        ]
        return peaks.base_bytes, np.array(columns, dtype=float).reshape(len(columns), len(peaks.base_bytes)).T

    def costs(self, micro: int) -> list[float]:
        """Of each unknown: the seconds with it everywhere less those as it stands, in its place, with what counting
        leaves out. What a block need not compute again, since backward reads none of it, is not in it. What trades time
        is never taken to save any: layers that read less are yet seldom faster."""
        plain = self._seconds((), micro)
        added = []
        for way in self.variables.steps:
            more = np.maximum(self._seconds(way, micro) - plain, 0.0)
            added.append(believed(Settings().having(*way), self._law) * (plain + more) - plain)
        return [
            float(added[step].sum() if block == -1 else added[step][block]) for step, block in self.variables.places
        ]

    def _seconds(self, way: Way, micro: int) -> np.ndarray:
        """(blocks + 1,): seconds in each block, and last outside them. Those in a module that several blocks share are
        split between them."""
        settings = self._plain.having(*way)
        model, found = self.memory_model(settings), np.zeros(self.variables.num_blocks + 1)
        step = next(filter(None, map(self._law.step, way)), None)
        counted = model if step is None else self.memory_model(self._plain)
        worked = ((module, took) for (module, _), took in _worked(self._law, counted, micro).items())
        pages = page_seconds(self._law, model.at(micro), settings.allocator) if self._law.new_byte_s else {}
        for module, took in (*worked, *pages.items(), *self._moved(way, micro)):
            holders = holders_of(module, self._places.holders) or (self.variables.num_blocks,)
            found[list(holders)] += took / len(holders)
        found[-1] += step.seconds(self._places.trained) if step is not None else 0.0
        return found

    def _moved(self, way: Way, micro: int) -> Iterable[tuple[str, float]]:
        """By module, what is elsewhere in the meantime."""
        for one in (one for one in way if isinstance(one, Offload) and self._law.counts(one)):
            with_it, without = (
                self.memory_model(self._plain.having(*others)).at(micro)
                for others in (way, tuple(other for other in way if other is not one))
            )
            yield from moved_seconds(self._law, with_it, without).items()


def _without_blocks(choices: tuple[Technique, ...]) -> tuple[Technique, ...]:
    """Those that do something where there are no blocks."""
    return tuple(one for one in choices if one.adds_up != "blocks" or one.in_blocks((), 0) != type(one)())


def believed(settings: Settings, law: TimeLaw = COUNTED) -> float:
    """Times as long as it is counted, by the prior of a search, for what the law does not count."""
    counted = (type(one)() for one in settings.chosen() if law.counts(one))
    gains = settings.having(*counted).prior_gains().values()
    return math.exp(-sum(mean for mean, _ in gains))


def _worked(law: TimeLaw, memory_model: MemoryModel, micro: int) -> Mapping[tuple[str, Phase], float]:
    """Seconds of each module and phase at a micro-batch: interpolated between the first and the last traced batch."""
    if memory_model.is_traced_at_each_batch or micro < memory_model.batches[0]:
        first = last = memory_model.trace_step(micro)
        share = 0.0
    else:
        first, *_, last = memory_model.steps
        share = (micro - memory_model.batches[0]) / (memory_model.batches[-1] - memory_model.batches[0])
    places = {**first.work, **last.work}
    one, other = ({place: seconds(law, step.work.get(place, Work())) for place in places} for step in (first, last))
    return {place: one[place] + (other[place] - one[place]) * share for place in places}
