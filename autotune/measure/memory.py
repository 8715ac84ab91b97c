"""Memory that the device charges the training process, and what the job takes of the host's.

Of the host's, a job takes its own peak (VmHWM: interpreter, model, an epoch or states that are kept there, page-locked
memory) and what its descendants take beside it: loader workers by their proportional sizes, and batches that lie ready.
No page is counted twice. On a CPU the device's memory is the host's, and this is what the process is charged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ..device_memory.context import changed_by_others, context_bytes, open_context
from ..plan import Budget, Peak, PhaseName, PhasePeak
from ..task import Task
from ..techniques.support.facts import Longest
from ..units import ceil_mib, format_bytes
from .life.growth import Witness
from .measurement import Growth
from .processes import (
    allocated_bytes,
    beside_bytes,
    count_anew,
    give_back,
    own_live_bytes,
    own_peak_bytes,
    peak_since_bytes,
    resident_bytes,
    unmapped_files_bytes,
)

_EXACT_BYTES, _FEWEST_EXACT = 4 * 1024, 4
"""Bytes a batch, and samples, that tell what piles up where memory in use is counted to the byte."""
_PAGES_BYTES, _FEWEST_PAGES = 64 * 1024, 12
"""The same where it is seen in whole pages, which an allocator keeps and gives back."""


LOOKS_S = 1.0
"""Seconds between two looks at loader workers while memory is watched: each takes some ms for every one of them."""


def of_others() -> Iterator[str]:
    """Said where others on the device took memory or gave some back, and the driver does not show whose is whose."""
    if torch.cuda.is_initialized() and (changed := changed_by_others()):  # type: ignore[no-untyped-call]
        yield (
            f"others on the device {'took' if changed > 0 else 'gave back'} {format_bytes(ceil_mib(abs(changed)))} "
            "while this was measured, and the driver does not show whose memory is whose: the peak may be off. Search "
            "where nothing else uses the device"
        )


def process_bytes(device: torch.device) -> int:
    """Bytes that this process is charged now; on CUDA, before anything is built, its context."""
    if device.type == "cuda":
        open_context()
    return Charge(device).peak().process


class Base:
    """What lies in this process when training begins, on a CPU: interpreter, torch, imports, data."""

    def __init__(self) -> None:
        """Of what lies here now."""
        resident, self._high_bytes = count_anew(), 0
        self._bytes = None if resident is None else resident + unmapped_files_bytes()

    def with_data(self, task: Task) -> Task:
        """The task, whose data become part of this as they are built."""
        return replace(task, build_dataset=lambda: self._built(task.build_dataset))

    def beside(self, others_bytes: int) -> int | None:
        """The most that was taken beside this, with ``others_bytes`` that the process is charged too; None where the
        kernel does not tell."""
        if self._bytes is None:
            return None
        self.hold()
        return max(self._high_bytes + others_bytes - self._bytes, 0)

    def hold(self) -> None:
        """Note the most so far: it is about to be counted anew."""
        self._high_bytes = max(self._high_bytes, peak_since_bytes())

    def _built(self, build: Callable[[], Any]) -> Any:
        before = resident_bytes()
        dataset = build()
        if self._bytes is not None:
            self._bytes += max(resident_bytes() - before, 0)
        return dataset


class Charge:
    """Memory usage of this process since it started."""

    def __init__(
        self,
        device: torch.device,
        largest_of: int | None = None,
        base: Base | None = None,
        longest: Longest | None = None,
    ) -> None:
        """
        Args:
            device: that the training runs on.
            largest_of: the peak is that of the largest of so many batches.
            base: what lay here before it; None is not known.
            longest: how the largest batch was found by lengths, where it was.
        """
        self.is_cuda = device.type == "cuda"
        """Whether that is the device's memory."""
        self._base = base
        self._largest: dict[str, Any] = {"largest_of": largest_of, "longest": longest}
        self._descendants_bytes = self._now_bytes = 0
        """What they took at most, and at the last look."""
        self._sampled_s = -math.inf
        self._phases: dict[PhaseName, PhasePeak] = {}
        self.phase: PhaseName | None = "training"
        """The one that this is; None is of no row."""
        self._earlier: dict[str, int] = {}
        """CUDA: the allocator's largest figures before they were counted anew."""

    def sample_descendants(self, every_s: float = 0.0) -> None:
        """Read what the loader's workers take, which leave no record of their peak, unless it was read less than
        ``every_s`` ago. Takes some ms for each."""
        if time.monotonic() - self._sampled_s < every_s:
            return
        self._sampled_s = time.monotonic()
        self._now_bytes = beside_bytes()
        self._descendants_bytes = max(self._descendants_bytes, self._now_bytes)

    def enter(self, phase: PhaseName | None) -> None:
        """Another phase of the job's life begins: what it takes is told apart from what was before. Training that goes
        on after another phase is in no row: allocators keep what that took."""
        self._note(self.phase)
        self.phase = phase
        if self._base is not None:
            self._base.hold()
        if self.is_cuda:
            self._earlier = self._device_high()
            torch.cuda.reset_peak_memory_stats()
        count_anew()

    def enter_once(self, phase: PhaseName | None) -> None:
        """The same, unless this is the phase."""
        if phase != self.phase:
            self.enter(phase)

    def first_step_ended(self) -> None:
        """An optimizer step has ended: if it was the first, the optimizer has its state now."""
        if "first_step" not in self._phases:
            self._note("first_step")

    def extend(self, phase: PhaseName, growth: Growth) -> None:
        """A phase was seen in part, and comes to what piles up in all of it."""
        row, value = self._phases[phase], growth.whole_bytes or 0
        if value > row.process:
            update = {"process": value, "low": growth.low_bytes, "high": growth.high_bytes}
            self._phases[phase] = row.model_copy(update=update)

    def taken(self) -> Callable[[], int]:
        """What is called with the most that was taken from now on, in this phase. What the allocator keeps for later is
        given back before, so that it hides nothing."""
        self._note(self.phase)
        if self.is_cuda:
            self._earlier = self._device_high()
            torch.cuda.reset_peak_memory_stats()
            began_with = torch.cuda.memory_allocated()
            return lambda: max(torch.cuda.max_memory_allocated() - began_with, 0)
        if self._base is not None:
            self._base.hold()
        give_back()
        before = count_anew() or peak_since_bytes()
        return lambda: max(peak_since_bytes() - before, 0)

    def phase_bytes(self, every_s: float = 0.0) -> int:
        """The most that the process was charged since the phase began, with descendants as they were less than
        ``every_s`` ago."""
        if self.is_cuda:
            return torch.cuda.max_memory_reserved() + context_bytes()
        self.sample_descendants(every_s)
        return peak_since_bytes() + unmapped_files_bytes() + self._now_bytes

    def _note(self, phase: PhaseName | None) -> None:
        if phase is None:
            return
        host = peak_since_bytes() if self.is_cuda else None
        now, row = PhasePeak(process=self.phase_bytes(), host=host), self._phases.get(phase)
        if row is None or now.process > row.process:
            self._phases[phase] = now

    def high_water_bytes(self) -> int:
        """Peak of the training itself: CUDA's reservation, or this process. Costs next to nothing."""
        return self._device_high()["reserved"] if self.is_cuda else own_peak_bytes()

    def _device_high(self) -> dict[str, int]:
        found = {"reserved": torch.cuda.max_memory_reserved(), "allocated": torch.cuda.max_memory_allocated()}
        return {name: max(value, self._earlier.get(name, 0)) for name, value in found.items()}

    def live_bytes(self) -> int | None:
        """Memory in use now: CUDA's live tensors, or this process's anonymous and shared pages; None if unknown."""
        return torch.cuda.memory_allocated() if self.is_cuda else own_live_bytes()

    def witness(self) -> Witness:
        """Tells what piles up: CUDA's tensors, what glibc was asked for, or else the process's pages, which tell less
        surely."""
        if self.is_cuda:
            return Witness(torch.cuda.memory_allocated, _EXACT_BYTES, _FEWEST_EXACT)
        if allocated_bytes() is not None:
            return Witness(allocated_bytes, _EXACT_BYTES, _FEWEST_EXACT)
        return Witness(own_live_bytes, _PAGES_BYTES, _FEWEST_PAGES)

    def peak(self) -> Peak:
        """The peak so far."""
        self._note(self.phase)
        others = unmapped_files_bytes() + self._descendants_bytes
        host, workers = own_peak_bytes() + others, self._descendants_bytes or None
        if not self.is_cuda:
            above = self._base.beside(others) if self._base is not None else None
            found = Peak(process=host, workers=workers, above_base=above, **self._largest)
            return found.with_phases(self._phases)
        reserved = self._device_high()["reserved"]
        found = Peak(
            process=reserved + context_bytes(),
            reserved=reserved,
            allocated=self._device_high()["allocated"],
            host=host,
            workers=workers,
            allocator_retries=torch.cuda.memory_stats().get("num_alloc_retries", 0),
            **self._largest,
        )
        return found.with_phases(self._phases)

    def exceeds(self, budget: Budget | None) -> bool:
        """Whether the peak so far is over the budget."""
        return budget is not None and budget.over(self.peak()) is not None
