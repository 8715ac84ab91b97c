"""Memory of a process on a CPU without its tensors: the interpreter, torch's own pages, and malloc's slack."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, MutableMapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...measure.processes import own_peak_bytes, unmapped_files_bytes
from ...measure.profiling.allocations import Trace
from ...techniques import Settings
from ...techniques.allocator import Allocator
from ...techniques.checkpointing import Checkpointing
from ...units import MIB
from ..types import WORKER_BYTES, Interval
from . import glibc as heap
from . import tcmalloc as pages

_ERROR = 0.02
"""Relative error of any prediction of the process, whatever the allocator."""
_SLACK_ERROR = 0.75
"""Additional error, as a share of what malloc is predicted to keep beyond the tensors. With it 2 % of the rows of
``benchmarks/replay/tables`` lie above their intervals, and at most 6 % of any one training and allocator. The slack
says how far off a prediction is for every allocator, also for a training whose rows were left out."""
_BESIDE_BYTES = {"tcmalloc": 5 * MIB}
"""What a preloaded allocator itself adds: the median over those configurations of the tables whose tensors are small.
:func:`resident_bytes` grew by 7 MiB with it."""


Replayed = MutableMapping[tuple[Trace, Allocator], int]
"""What an allocator keeps resident for a step."""


def resident_bytes(settings: Settings) -> int:
    """Bytes that this process is charged once it has trained a small model of every common kind of layer.

    The model is trained with the precision, memory-saving layers and checkpointing of these settings, which bring code
    of their own. Call it before anything large is built: a kernel's pages, and its threads, are there only once it has
    run.
    """
    torch.manual_seed(0)
    model = _Small()
    settings.layers.in_blocks((0, 1), 2).on_model(model, [model.images, model.block])
    if settings.checkpointing.kind != "none":
        Checkpointing(kind="blocks").on_model(model, [model.images, model.block])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.precision.has_context):
            loss = model(torch.randn(8, 3, 16, 16))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return own_peak_bytes() + unmapped_files_bytes()


class _Small(nn.Module):
    """Convolution, norms, attention, a loss: under 1 MiB together."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
        self.block = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, activation="gelu", batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(self.images(x).flatten(2).transpose(1, 2))
        return F.cross_entropy(self.head(y.mean(1)), torch.zeros(len(x), dtype=torch.long))


def process_interval(
    base_bytes: int, trace: Trace, tensors: Interval, settings: Settings, replayed: Replayed | None = None
) -> Interval:
    """What the process is charged at its peak.

    Args:
        base_bytes: without the tensors; loader workers come on top.
        trace: a step; where its peak is another than the tensors', what malloc adds is taken in proportion.
        tensors: at their peak.
        settings: whose allocator it is.
        replayed: what is known of traces, and is added to.
    """
    allocator = settings.allocator
    known = {} if replayed is None else replayed
    if (trace, allocator) not in known:
        threshold = allocator.maps_from if allocator.kind == "mmap" else None
        resident = _RESIDENT.get(allocator.kind) or functools.partial(heap.resident_peak_bytes, threshold=threshold)
        known[trace, allocator] = resident(trace)
    added = known[trace, allocator] / trace.peak_bytes()
    beside = base_bytes + _BESIDE_BYTES.get(allocator.kind, 0)
    low, value, high = (beside + round(part * added) for part in (tensors.low, tensors.value, tensors.high))
    error = round(_ERROR * value + _SLACK_ERROR * (added - 1) * tensors.value)
    return Interval(low=low - error, value=value, high=high + error)


def _guessed_bytes(trace: Trace) -> int:
    """Resident bytes under jemalloc, by a guess: its rules were not looked into."""
    return round(1.05 * trace.peak_bytes())


_RESIDENT: Mapping[str, Callable[[Trace], int]] = {
    "tcmalloc": pages.resident_peak_bytes,
    "jemalloc": _guessed_bytes,
}
"""By the allocator; glibc's own for the others."""


def workers_bytes(settings: Settings) -> int:
    """Bytes that loader workers add to what the job is charged."""
    return (settings.data_loading.num_workers or 0) * WORKER_BYTES
