"""glibc's malloc by hand arithmetic: mappings, the top, holes, the threshold."""

from __future__ import annotations

import random
from itertools import pairwise

from autotune.estimates.allocators.free_list import replay
from autotune.estimates.allocators.glibc import Heap, TensorHeap, resident_peak_bytes
from autotune.measure.profiling.allocations import Allocation, Span, Trace
from autotune.units import MIB

PAGE = 4096


def test_large_ones_are_mapped_and_given_back():
    """1 MiB and what alignment asks for, in pages; then as much again in the same place."""
    heap = Heap()
    heap.free(heap.allocate(MIB))
    heap.allocate(MIB // 2)
    assert heap.peak_bytes == MIB + PAGE


def test_once_one_was_unmapped_others_of_its_size_come_from_the_heap_and_stay():
    """1 MiB mapped and unmapped raises the threshold: two of half of it lie in the heap, whose top is not trimmed below
    2 MiB."""
    heap = Heap()
    heap.free(heap.allocate(MIB))
    blocks = [heap.allocate(MIB // 2) for _ in range(2)]
    for block in blocks:
        heap.free(block)
    heap.allocate(40 * MIB)
    assert 41 * MIB < heap.peak_bytes < 41 * MIB + 3 * PAGE


def test_with_a_fixed_threshold_what_was_unmapped_is_mapped_again():
    """1 MiB twice, then ten small ones, of which only the pages that they are on stay."""
    heap = Heap(threshold=MIB)
    for _ in range(2):
        heap.free(heap.allocate(16 * MIB))
        heap.free(heap.allocate(MIB))
    assert heap.peak_bytes == 16 * MIB + PAGE
    blocks = [heap.allocate(MIB // 2) for _ in range(10)]
    for block in blocks:
        heap.free(block)
    heap.allocate(20 * MIB)
    assert heap.peak_bytes < 20 * MIB + 3 * PAGE + 128 * 1024


def test_a_hole_of_its_own_size_does_not_take_an_aligned_block():
    """Sought are 96 bytes more than are kept: between two that stay, a block that was freed is not had again."""
    heap = Heap()
    heap.free(heap.allocate(16 * MIB))  # from here on below 16 MiB in the heap
    heap.peak_bytes = 0
    blocks = [heap.allocate(MIB - 16) for _ in range(3)]
    heap.free(blocks[1])
    heap.allocate(MIB - 16)
    assert 4 * MIB < heap.peak_bytes < 4 * MIB + PAGE


def test_what_lies_at_the_top_is_trimmed():
    """Freed above the threshold's double of 2 MiB, the top goes back: then 3 MiB that are mapped raise no peak of 5."""
    heap = Heap()
    heap.free(heap.allocate(MIB))
    blocks = [heap.allocate(MIB // 2) for _ in range(10)]
    for block in reversed(blocks):
        heap.free(block)
    before = heap.peak_bytes
    heap.allocate(3 * MIB)
    assert before == heap.peak_bytes


def test_no_two_blocks_overlap():
    rng, heap, taken = random.Random(0), Heap(), []
    for _ in range(3000):
        if taken and rng.random() < 0.5:
            heap.free(taken.pop(rng.randrange(len(taken))))
        else:
            taken.append(heap.allocate(int(2 ** rng.uniform(5, 22))))
        lying = sorted((block for block in taken if block.address >= 0), key=lambda block: block.address)
        assert all(one.address + one.num_bytes <= two.address for one, two in pairwise(lying))
        assert all((block.address + 16) % 64 == 0 for block in lying)


def test_a_small_chunk_takes_part_of_a_hole():
    """112 bytes of a hole of 1 MiB, of which the rest is too small for what had been there."""
    heap = Heap()
    heap.free(heap.allocate(16 * MIB))
    heap.peak_bytes = 0
    blocks = [heap.allocate(MIB) for _ in range(2)]
    heap.free(blocks[0])
    small = heap.chunk(112)
    assert small.num_bytes == 112
    assert small.address == 0
    heap.allocate(MIB)
    assert 3 * MIB < heap.peak_bytes < 3 * MIB + PAGE


def test_what_comes_with_a_tensor_outlives_it():
    """Four objects of 48 to 112 bytes each; of 40 tensors' 160, all but 150 go with their tensors."""
    tensors = TensorHeap()
    made = [tensors.allocate(1024) for _ in range(40)]
    assert [block.num_bytes for _, block in made[0][1]] == [48, 112, 64, 48]
    for tensor in made:
        tensors.free(tensor)
    assert len(tensors._left) == 150
    assert sum(map(len, tensors._cached)) == 10


def test_slack_grows_with_the_root_of_the_turnover():
    """One of 1 MiB made and freed four times keeps what is replayed; sixteen times, twice the slack of its replay."""

    def slack(times: int) -> tuple[int, int]:
        allocations = tuple(
            Allocation(number, MIB, 2 * number + 1, 2 * number + 2, "", "forward", "temporary")
            for number in range(times)
        )
        trace = Trace(allocations, (Span("forward", 0),), 2 * times + 1)
        tensors = TensorHeap()
        replay(trace, tensors)
        return resident_peak_bytes(trace) - MIB, tensors.heap.peak_bytes - MIB

    kept, replayed = slack(4)
    assert kept == replayed > 0
    kept, replayed = slack(16)
    assert kept == 2 * replayed
