"""CUDA's caching allocator by hand arithmetic: segments, splits, best fit, merging; no device."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autotune.estimates.allocators.cuda_caching import CachingAllocator, Full, process_interval
from autotune.estimates.allocators.free_list import replay
from autotune.estimates.types import EstimateOptions, Interval
from autotune.measure.profiling.allocations import Allocation, Phase, Span, Trace
from autotune.units import MIB

CONTEXT, LEAST_CONTEXT, MOST_CONTEXT = 512 * MIB, 300 * MIB, 768 * MIB


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, 0),
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
    ],
)
def test_a_first_allocation_reserves(num_bytes, expected):
    """Small ones 2 MiB, larger ones 20, from 10 MiB on multiples of 2."""
    allocator = CachingAllocator()
    allocator.allocate(num_bytes)
    assert allocator.reserved_bytes == expected


def test_sizes_are_rounded_to_512_bytes():
    """4,096 blocks of 1 to 512 bytes fill 2 MiB; the next one asks for another segment."""
    allocator = CachingAllocator()
    for number in range(4096):
        allocator.allocate(1 + number % 512)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.allocate(1)
    assert allocator.reserved_bytes == 4 * MIB


def test_a_large_blocks_rest_of_a_mebibyte_is_not_split_off():
    """Of 20 MiB, 9.5 and 9.5 leave 1: the second takes it too, and 1.5 more need a segment."""
    allocator = CachingAllocator()
    for size in (9.5, 9.5):
        allocator.allocate(int(size * MIB))
    allocator.allocate(MIB + 512)
    assert allocator.reserved_bytes == 40 * MIB


def test_the_best_fit_is_the_smallest_that_is_large_enough():
    """Of 12 and 16 MiB, 11 go into the 12, whose rest is too small to be split off, and 15 into the 16."""
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (16, 12)]
    for block in blocks:
        allocator.free(block)
    allocator.allocate(11 * MIB)
    allocator.allocate(15 * MIB)
    assert allocator.reserved_bytes == 28 * MIB


def test_freed_neighbours_are_one_block_again():
    """Three of 6 MiB in 20 are freed, the middle one last: then 18 fit there."""
    allocator = CachingAllocator()
    first, middle, last = (allocator.allocate(6 * MIB) for _ in range(3))
    for block in (first, last, middle):
        allocator.free(block)
    allocator.allocate(18 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_of_equal_blocks_the_one_in_the_newer_segment_is_taken():
    """12 and 12 MiB share 24, and 12 more have a segment of their own. One half and the segment are freed, and 12 go
    into the segment, so that the other half's end leaves 24 for the next 24: they would take 60 otherwise."""
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(24 * MIB))
    half, other, apart = (allocator.allocate(12 * MIB) for _ in range(3))
    for block in (half, apart):
        allocator.free(block)
    allocator.allocate(12 * MIB)
    allocator.free(other)
    allocator.allocate(24 * MIB)
    assert allocator.reserved_bytes == 36 * MIB


def test_segments_are_not_merged():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(10 * MIB) for _ in range(2)]
    for block in blocks:
        allocator.free(block)
    allocator.allocate(20 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_a_hole_that_is_too_small_stays():
    """Fragmentation: 12 freed of 24 in use do not serve 14."""
    allocator = CachingAllocator()
    first, _ = (allocator.allocate(12 * MIB) for _ in range(2))
    allocator.free(first)
    allocator.allocate(14 * MIB)
    assert allocator.reserved_bytes == 38 * MIB


def test_small_and_large_do_not_share():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MIB))
    allocator.allocate(4096)
    assert allocator.reserved_bytes == 14 * MIB


def test_no_bytes_are_lost_or_given_twice():
    """Random traffic: what is free and what is taken is what is reserved, and no two blocks overlap."""
    rng, allocator, taken = random.Random(0), CachingAllocator(), []
    for _ in range(3000):
        if taken and rng.random() < 0.5:
            allocator.free(taken.pop(rng.randrange(len(taken))))
        else:
            taken.append(allocator.allocate(int(2 ** rng.uniform(6, 25))))
    blocks = sorted([*taken, *allocator.free_blocks()], key=lambda block: block.address)
    ends = [block.address + block.num_bytes for block in blocks]
    assert [block.address for block in blocks] == [-allocator.reserved_bytes, *ends[:-1]]
    assert ends[-1] == 0


def step(*scratch):
    """Parameters of 12 MiB; an activation of 30, freed before a gradient of 12; state of 24 since the first step's
    optimizer."""
    made = [
        Allocation(0, 12 * MIB, 0, None, "a", "before", "parameter"),
        Allocation(1, 24 * MIB, 0, None, "a", "before", "optimizer_state"),
        Allocation(2, 30 * MIB, 1, 2, "a", "forward", "activation"),
        *scratch,
        Allocation(3 + len(scratch), 12 * MIB, 3, 5, "a", "backward", "gradient"),
    ]
    return Trace(tuple(made), (Span("forward", 0), Span("backward", 2), Span("optimizer", 4)), 6)


def test_a_gradient_that_is_cleared_after_the_next_forward_is_beside_its_activations():
    """The 12 MiB that are cleared as backward begins are beside the 30 of forward from the second step on, in segments
    of their own: the last step's and this step's take turns. Cleared at the step's end, they lie within the 30."""
    made = step().allocations
    late = replace(step(), allocations=(*made[:3], replace(made[3], died=2)))
    assert [one // MIB for one in late.live_bytes()] == [48, 78, 36, 48, 48, 48]
    assert late.peak_bytes() == step().peak_bytes() + 12 * MIB
    assert [one.id for one in late.alive_at(1)] == [0, 1, 2, 3]
    reserved = []
    for trace in (step(), late):
        allocator = CachingAllocator()
        replay(trace, allocator)
        reserved.append(allocator.peak_bytes // MIB)
    assert reserved == [12 + 30 + 24, 12 + 30 + 24 + 30]


def process(trace, capability, share=1.0):
    peak = trace.peak_bytes()
    tensors = Interval(low=peak, value=peak, high=round(share * peak))
    return process_interval(trace, tensors, EstimateOptions(target="cuda", capability=capability), 0)


RESERVED = (12 + 30 + 24) * MIB
"""The gradient goes into the activation's 30, with 18 to spare; the state does not fit there, and has 24 of its own;
and so each step after."""


@pytest.mark.parametrize(
    ("capability", "low", "value"),
    [
        *(((8, 6), 20, 20), ((9, 0), 64, 64), ((10, 0), 64, 64), ((12, 0), 64, 64), ((7, 5), 20, 20), (None, 20, 64)),
        ((9, 4), 256, 256),
    ],
)
def test_a_process_is_a_context_cublas_and_segments(capability, low, value):
    """cuBLAS is given 8.125 MiB twice, in one segment of 20; or 32 twice on Hopper and Blackwell; hipBLAS 128 twice on
    AMD's gfx942. Which, where the card is not known, the interval leaves open."""
    found = process(step(), capability)
    assert found.value == CONTEXT + value * MIB + RESERVED
    assert found.high == MOST_CONTEXT + value * MIB + RESERVED
    assert found.low == LEAST_CONTEXT + low * MIB + RESERVED


def test_what_kernels_take_is_reserved_but_for_the_lower_end():
    """40 MiB beside the activation have a segment of their own, in which the first step's optimizer puts the state; so
    the second step needs another."""
    taken = Allocation(3, 40 * MIB, 1, 2, "a", "forward", "temporary", is_scratch=True)
    found = process(step(taken), (8, 0))
    assert found.value == CONTEXT + (20 + 12 + 30 + 40 + 40) * MIB
    assert found.low == LEAST_CONTEXT + 20 * MIB + RESERVED


def test_a_workspace_in_forward_may_save_a_segment_so_that_the_upper_end_does_without():
    """24 MiB of workspace leave a segment for two activations of 12, which is whole again for backward's 24. Without,
    each activation has one of its own, and backward's workspace a third."""
    made = [
        Allocation(0, 24 * MIB, 1, 2, "a", Phase.FORWARD, "temporary", is_scratch=True),
        Allocation(1, 12 * MIB, 3, 5, "a", Phase.FORWARD, "activation"),
        Allocation(2, 12 * MIB, 4, 6, "a", Phase.FORWARD, "activation"),
        Allocation(3, 24 * MIB, 7, 8, "a", Phase.BACKWARD, "temporary", is_scratch=True),
    ]
    found = process(Trace(tuple(made), (Span(Phase.FORWARD, 0), Span(Phase.BACKWARD, 5)), 9), (9, 0))
    assert found.value == CONTEXT + (64 + 24) * MIB
    assert found.high == MOST_CONTEXT + (64 + 12 + 12 + 24) * MIB


def test_what_a_library_keeps_is_a_share_of_what_is_reserved():
    """256 MiB for hipBLAS and 66 of the step: half as much again, and as much again at the upper end."""
    peak = step().peak_bytes()
    options = EstimateOptions(target="cuda", capability=(9, 4), workspaces=(0.5, 1.0))
    found = process_interval(step(), Interval(low=peak, value=peak, high=peak), options, 0)
    assert (found.low, found.value, found.high) == (
        LEAST_CONTEXT + 322 * MIB,
        CONTEXT + 483 * MIB,
        MOST_CONTEXT + 644 * MIB,
    )


def test_what_is_reserved_is_in_proportion_to_the_tensors_peak():
    assert process(step(), (8, 0), share=1.5).high == MOST_CONTEXT + round(1.5 * (20 * MIB + RESERVED))


def test_a_free_segment_is_given_back_where_another_would_not_fit():
    """Of 30 MiB, 12 are taken and 16 free: 18 more are had for those. Most at once were 30."""
    allocator = CachingAllocator(30 * MIB)
    allocator.allocate(12 * MIB)
    allocator.free(allocator.allocate(16 * MIB))
    allocator.allocate(18 * MIB)
    assert allocator.reserved_bytes == allocator.peak_bytes == 30 * MIB


def test_a_segment_that_is_partly_in_use_is_not_given_back():
    """18 free MiB beside 2 in one of 20 cannot be had for another."""
    allocator = CachingAllocator(32 * MIB)
    allocator.allocate(2 * MIB)
    allocator.allocate(12 * MIB)
    with pytest.raises(Full):
        allocator.allocate(20 * MIB)


def test_what_is_given_back_is_used_no_more():
    """The 16 MiB are gone: 4 do not fit there, and want a segment of 20."""
    allocator = CachingAllocator(30 * MIB)
    allocator.allocate(12 * MIB)
    allocator.free(allocator.allocate(16 * MIB))
    allocator.allocate(18 * MIB)
    with pytest.raises(Full):
        allocator.allocate(4 * MIB)
    assert allocator.free_blocks() == []


def test_with_enough_room_a_limit_changes_nothing():
    rng = random.Random(1)
    sizes = [int(2 ** rng.uniform(6, 25)) for _ in range(500)]
    reserved = []
    for limit in (None, 2**40):
        allocator = CachingAllocator(limit)
        for size in sizes:
            block = allocator.allocate(size)
            if size % 3:
                allocator.free(block)
        reserved.append((allocator.reserved_bytes, allocator.peak_bytes))
    assert reserved[0] == reserved[1]


@pytest.mark.parametrize(("room", "expected"), [(None, 96), (96, 96), (95, 66), (66, 66), (65, 96)])
def test_a_step_fits_where_the_allocator_gives_segments_back(room, expected):
    """20 MiB for cuBLAS, 12 of parameters, 30 of an activation that is gone when 34 are asked for: 96, or 66 where the
    30 are given back. What fits nowhere is told as on a larger device."""
    made = (
        Allocation(0, 12 * MIB, 0, None, "a", "before", "parameter"),
        Allocation(1, 30 * MIB, 1, 2, "a", "forward", "activation"),
        Allocation(2, 34 * MIB, 3, 4, "a", "backward", "temporary"),
    )
    trace = Trace(made, (Span("forward", 0), Span("backward", 2), Span("optimizer", 5)), 6)
    tensors = Interval(low=46 * MIB, value=46 * MIB, high=46 * MIB)
    limit = None if room is None else CONTEXT + room * MIB
    options = EstimateOptions(target="cuda", capability=(8, 0), limit_bytes=limit)
    assert process_interval(trace, tensors, options, 0).value == CONTEXT + expected * MIB


@pytest.mark.parametrize(("room", "expected"), [(None, 500), (600, 500), (300, 300), (80, 500)])
def test_what_a_kernel_may_take_is_in_the_upper_end_up_to_the_limit(room, expected):
    """20 MiB for cuBLAS and 66 of the step, which may take 414 more: in 300 it does without, and in 80 nothing does."""
    peak = step().peak_bytes()
    limit = None if room is None else MOST_CONTEXT + room * MIB
    options = EstimateOptions(target="cuda", capability=(8, 0), limit_bytes=limit)
    found = process_interval(step(), Interval(low=peak, value=peak, high=peak), options, 414 * MIB)
    assert found.high == MOST_CONTEXT + expected * MIB
