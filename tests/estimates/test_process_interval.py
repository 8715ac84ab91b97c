"""What a process is charged on a CPU, by hand arithmetic."""

from __future__ import annotations

import pytest

from autotune.estimates.allocators.process import process_interval
from autotune.estimates.types import Interval
from autotune.measure.profiling.allocations import Allocation, Span, Trace
from autotune.techniques import Settings
from autotune.units import MIB

TENSORS = Interval(low=100 * MIB, value=100 * MIB, high=100 * MIB)


def charged(allocator: str | None, tensors: Interval = TENSORS) -> list[float]:
    """MiB, of a base of 200 MiB and a step that makes one tensor of 100."""
    one = Allocation(id=0, num_bytes=100 * MIB, born=0, died=1, module="", phase="forward", kind="activation")
    settings = Settings(allocator={"kind": allocator} if allocator else {})
    found = process_interval(200 * MIB, Trace((one,), (), 2), tensors, settings)
    return [round(part / MIB, 2) for part in (found.low, found.value, found.high)]


def test_what_malloc_adds_is_three_quarters_uncertain_and_everything_2_percent():
    """jemalloc is taken to add 5 MiB: 305, off by 6.1 and by 3.75."""
    assert charged("jemalloc") == [295.15, 305.0, 314.85]


def test_a_preloaded_allocator_is_charged_itself():
    """tcmalloc adds nothing to one tensor, and takes 5 MiB: 305, off by 6.1."""
    assert charged("tcmalloc") == [298.9, 305.0, 311.1]


def test_what_is_not_known_of_the_tensors_comes_on_top():
    """5 MiB either way, and 2 % of 305."""
    assert charged("tcmalloc", Interval(low=95 * MIB, value=100 * MIB, high=105 * MIB)) == [293.9, 305.0, 316.1]


def test_what_is_below_the_size_from_which_on_tensors_are_mapped_stays_on_the_heap():
    """3 MiB that are freed before 40 are made: 40 from 1 MiB on. From 4 MiB on these 3 stay on the heap, and the next
    step's beside them, for whom their hole is too small: 6, in part, since a step that makes 43 MiB over a peak of 40
    leaves the root of 43 / 40 / 4 of what its replay does."""
    made = [(0, 3 * MIB, 1, 2), (1, 40 * MIB, 3, 4)]
    trace = Trace(tuple(Allocation(*one, "", "forward", "activation") for one in made), (Span("forward", 0),), 5)
    tensors = Interval(low=40 * MIB, value=40 * MIB, high=40 * MIB)
    found = [
        process_interval(0, trace, tensors, Settings(allocator={"kind": "mmap", "from_mib": from_mib})).value / MIB
        for from_mib in (1, 4)
    ]
    assert found == [pytest.approx(40, abs=0.02), pytest.approx(40 + 6 * (43 / 40 / 4) ** 0.5, abs=0.02)]
