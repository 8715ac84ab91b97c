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
from ..plan import Budget, Peak
from ..task import Task
from ..techniques.support.facts import Longest
from ..units import ceil_mib, format_bytes
from .processes import (
    beside_bytes,
    count_anew,
    own_live_bytes,
    own_peak_bytes,
    peak_since_bytes,
    resident_bytes,
    unmapped_files_bytes,
)


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
        resident = count_anew()
        self._bytes = None if resident is None else resident + unmapped_files_bytes()

    def with_data(self, task: Task) -> Task:
        """The task, whose data become part of this as they are built."""
        return replace(task, build_dataset=lambda: self._built(task.build_dataset))

    def beside(self, others_bytes: int) -> int | None:
        """The most that was taken beside this, with ``others_bytes`` that the process is charged too; None where the
        kernel does not tell."""
        if self._bytes is None:
            return None
        return max(peak_since_bytes() + others_bytes - self._bytes, 0)

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
        self._descendants_bytes = 0
        self._sampled_s = -math.inf

    def sample_descendants(self, every_s: float = 0.0) -> None:
        """Read what the loader's workers take, which leave no record of their peak, unless it was read less than
        ``every_s`` ago. Takes some ms for each."""
        if time.monotonic() - self._sampled_s < every_s:
            return
        self._sampled_s = time.monotonic()
        self._descendants_bytes = max(self._descendants_bytes, beside_bytes())

    def high_water_bytes(self) -> int:
        """Peak of the training itself: CUDA's reservation, or this process. Costs next to nothing."""
        return torch.cuda.max_memory_reserved() if self.is_cuda else own_peak_bytes()

    def live_bytes(self) -> int | None:
        """Memory in use now: CUDA's live tensors, or this process's anonymous and shared pages; None if unknown."""
        return torch.cuda.memory_allocated() if self.is_cuda else own_live_bytes()

    def peak(self) -> Peak:
        """The peak so far."""
        others = unmapped_files_bytes() + self._descendants_bytes
        host, workers = own_peak_bytes() + others, self._descendants_bytes or None
        if not self.is_cuda:
            above = self._base.beside(others) if self._base is not None else None
            return Peak(process=host, workers=workers, above_base=above, **self._largest)
        reserved = torch.cuda.max_memory_reserved()
        return Peak(
            process=reserved + context_bytes(),
            reserved=reserved,
            allocated=torch.cuda.max_memory_allocated(),
            host=host,
            workers=workers,
            allocator_retries=torch.cuda.memory_stats().get("num_alloc_retries", 0),
            **self._largest,
        )

    def exceeds(self, budget: Budget | None) -> bool:
        """Whether the peak so far is over the budget."""
        return budget is not None and budget.over(self.peak()) is not None
