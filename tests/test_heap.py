"""glibc's malloc by hand arithmetic: mappings, the top, holes, the threshold."""

from __future__ import annotations

import random
from itertools import pairwise

from autotune.estimate.heap import Heap
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
