"""``law_here``: the seconds that counted work takes on the device that a job runs on, found in tens of milliseconds.

Of each speed the fastest of several short runs counts: what else runs on the machine makes none faster. On a card it is
that of several in a row.
"""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..measure.profiling.allocations import Phase, Trace
from ..techniques.allocator import Allocator
from ..units import MIB
from .tracing.fake_ops import Target
from .tracing.work import Work
from .types import TimeLaw

_MOST_S, _MOST_RUNS = 0.2, 24
"""Of each figure, seconds after which no further run is begun, and most runs."""
_SIDES: dict[Target, tuple[int, int]] = {"cpu": (64, 512), "cuda": (256, 4096)}
"""Smallest and largest of a matrix: larger ones ran no faster, and are disturbed more."""
_COPIED: dict[Target, int] = {"cpu": 32 * MIB, "cuda": 512 * MIB}
"""Most bytes that are copied, piece by piece: more than most caches hold. An H200's has 60 MiB."""
_PIECES = 8
_IN_A_ROW: dict[Target, int] = {"cpu": 1, "cuda": _PIECES}
"""Runs that are timed together: a card's begin one after the other, without the host's wait for each."""
_TOUCHED = 16 * MIB
"""Most bytes of new pages: of fewer, the system hands out the same ones again, which are in a cache."""
SHARE = 8
"""So much of the tensors' peak is copied that calibrating takes less than that."""


def law_here(target: Target, dtype: torch.dtype, flops: Iterable[int], peak_bytes: int) -> TimeLaw:
    """The law of this machine's device, measured once in a process for each size and type.

    Args:
        target: the device.
        dtype: that products are computed in.
        flops: of the job's modules and phases: the matrices that are multiplied are of their size.
        peak_bytes: of the job's tensors.
    """
    counts = [*flops]
    typical = sum(one**2 for one in counts) / max(1, sum(counts)) / 2  # where most operations are
    least, most = _SIDES[target]
    side = min(most, max(least, power_of_two(typical ** (1 / 3))))
    return measured_law(target, dtype, side, copied_bytes(target, peak_bytes), where_of(target))


def copied_bytes(target: Target, peak_bytes: int) -> int:
    """That are copied, of a job whose tensors take so many."""
    return power_of_two(min(_COPIED[target], max(MIB, peak_bytes / SHARE)))


def where_of(target: Target) -> int:
    """What speeds hold for: the current card's number; of a CPU, torch's threads."""
    return torch.cuda.current_device() if target == "cuda" else torch.get_num_threads()


@cache
def measured_law(target: Target, dtype: torch.dtype, side: int, num_bytes: int, where: int) -> TimeLaw:
    """Seconds for a floating-point operation of a product of two square matrices, for a byte that a copy reads or
    writes, and on a CPU for a byte of a page that the process did not have.

    Args:
        target: the device.
        dtype: of the matrices.
        side: of them.
        num_bytes: that are copied.
        where: by :func:`where_of`. What was measured holds for that alone.
    """
    with torch.no_grad(), torch.autocast(target, enabled=False):
        a, b = (torch.ones(side, side, dtype=dtype, device=target) for _ in range(2))
        product = torch.empty_like(a)
        product_s = least_s(lambda: torch.mm(a, b, out=product), target)
        sources, copy_s = _copied(target, num_bytes)
        piece_bytes, new_s = len(sources[0]), 0.0
        if target == "cpu":
            there = sources.flatten()[:_TOUCHED]
            touched_s = least_s(lambda: _touch(len(there)), target) - least_s(lambda: there.fill_(1), target)
            new_s = max(0.0, touched_s) / len(there)
    return TimeLaw(
        flop_s=product_s / (2 * side**3),
        byte_s=copy_s / (2 * piece_bytes),
        new_byte_s=new_s,
        is_measured=True,
    )


def seconds(law: TimeLaw, work: Work) -> float:
    """What work takes by a law."""
    return law.flop_s * work.flops + law.byte_s * work.num_bytes


def page_seconds(law: TimeLaw, trace: Trace, allocator: Allocator) -> dict[str, float]:
    """By module, what a step's new pages take: those of tensors that get pages of their own, and do not stay."""
    found: dict[str, float] = {}
    for one in trace.allocations if law.new_byte_s else ():
        if one.born > 0 and one.died is not None and one.num_bytes >= allocator.maps_from:
            found[one.module] = found.get(one.module, 0.0) + law.new_byte_s * one.num_bytes
    return found


def moved_seconds(law: TimeLaw, trace: Trace, without: Trace) -> dict[str, float]:
    """By module, what offload takes: what comes back from a file is allocated once more, as often as it is read, and
    what forward keeps no longer was written.

    Args:
        law: with the file's speeds.
        trace: of a step.
        without: of the same step without offload.
    """
    found: dict[str, float] = {}
    for sign, allocations in ((1, trace.allocations), (-1, without.allocations)):
        for one in allocations:
            if one.born > 0 and one.phase in (Phase.FORWARD, Phase.BACKWARD) and not one.is_scratch:
                found[one.module] = found.get(one.module, 0.0) + sign * law.read_byte_s * one.num_bytes
            if one.kept_by is not None and one.phase is Phase.FORWARD and one.kind in ("activation", "batch"):
                found[one.kept_by] = found.get(one.kept_by, 0.0) - sign * law.write_byte_s * one.num_bytes
    return {module: more_s for module, more_s in found.items() if more_s > 0}


def power_of_two(number: float) -> int:
    """The largest within a number."""
    return 1 << max(1, int(number)).bit_length() - 1


def _copied(target: Target, num_bytes: int) -> tuple[Tensor, float]:
    """Pieces of memory that was copied, and seconds of one."""
    sources, copies = (torch.ones(_PIECES, num_bytes // _PIECES, dtype=torch.uint8, device=target) for _ in "ab")
    pieces = itertools.cycle(zip(sources, copies, strict=True))
    return sources, least_s(lambda: _copy(*next(pieces)), target)


def _copy(source: Tensor, to: Tensor) -> None:
    to.copy_(source)


def _touch(num_bytes: int) -> None:
    """Take fresh pages from the system, write to each, and give them back."""
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON) as pages:
        torch.frombuffer(pages, dtype=torch.uint8).fill_(1)


def least_s(run: Callable[[], Any], target: Target, most_s: float = _MOST_S) -> float:
    """Seconds of the fastest of several runs, the first of which does not count, none begun after ``most_s``. One
    thread's are told by a clock that stands while others have the processor, up to three times that."""
    wait: Callable[[], Any] = torch.cuda.synchronize if target == "cuda" else lambda: None
    in_a_row = range(_IN_A_ROW[target])
    clock = time.thread_time if target == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    run()
    wait()
    least, ends_s, at_most_s = float("inf"), clock() + most_s, time.perf_counter() + 3 * most_s
    for _ in range(_MOST_RUNS):
        began_s = clock()
        for _ in in_a_row:
            run()
        wait()
        least = min(least, (clock() - began_s) / len(in_a_row))
        if clock() > ends_s or time.perf_counter() > at_most_s:
            break
    return least
