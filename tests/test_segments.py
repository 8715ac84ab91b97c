"""CUDA's caching allocator by hand arithmetic: segments, splits, best fit, merging; no device."""

from __future__ import annotations

import random

import pytest

from autotune.estimate.segments import CachingAllocator, reserved_bytes
from autotune.measure.allocations import Allocation, Span, Trace
from autotune.units import MIB

WORKSPACES = 2 * (2 * 4 * MIB + MIB // 8)
"""Two of cuBLAS's, 8.125 MiB each: one segment of 20 MiB."""


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
    assert [block.address for block in blocks] == [0, *ends[:-1]]
    assert ends[-1] == allocator.reserved_bytes


def test_a_steps_reserved_bytes():
    """Parameters of 12 MiB; a step makes an activation of 30, and frees it before a gradient of 12; state of 24 since
    the first step's optimizer. The gradient goes into the activation's 30, with 18 to spare; the state does not fit
    there, and has 24 of its own; and so each step after: 12 + 30 + 24, and the workspaces' 20."""
    made = [
        Allocation(0, 12 * MIB, 0, None, "a", "before", "parameter"),
        Allocation(1, 24 * MIB, 0, None, "a", "before", "optimizer_state"),
        Allocation(2, 30 * MIB, 1, 2, "a", "forward", "activation"),
        Allocation(3, 12 * MIB, 3, 5, "a", "backward", "gradient"),
    ]
    trace = Trace(tuple(made), (Span("forward", 0), Span("backward", 2), Span("optimizer", 4)), 6)
    assert WORKSPACES < 20 * MIB
    assert reserved_bytes(trace) == (20 + 12 + 30 + 24) * MIB
