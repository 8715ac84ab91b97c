"""tcmalloc's page heap by hand arithmetic: runs of 8 KiB pages, growth, merging, small objects."""

from __future__ import annotations

import random
from itertools import pairwise

from autotune.estimates.allocators.tcmalloc import Pages
from autotune.units import MIB

PAGE = 8192


def test_a_hole_of_its_own_size_serves_again():
    pages = Pages()
    blocks = [pages.allocate(2 * MIB) for _ in range(3)]
    pages.free(blocks[1])
    pages.allocate(2 * MIB - 5)
    assert pages.peak_bytes == 6 * MIB


def test_it_grows_by_1_mib_at_least():
    """Two of 512 KiB lie in one growth; half a MiB and a page do not fit beside half a MiB."""
    pages = Pages()
    pages.allocate(MIB // 2)
    assert pages.peak_bytes == MIB
    pages.allocate(MIB // 2)
    assert pages.peak_bytes == MIB
    pages.allocate(MIB // 2 + 1)
    assert pages.peak_bytes == 2 * MIB


def test_what_is_free_at_the_end_does_not_make_it_grow_less():
    """2 MiB were given back: 3 MiB are grown all the same, behind them, after which 5 MiB lie free in one piece."""
    pages = Pages()
    pages.free(pages.allocate(2 * MIB))
    block = pages.allocate(3 * MIB)
    assert pages.peak_bytes == 5 * MIB
    pages.free(block)
    pages.allocate(5 * MIB)
    assert pages.peak_bytes == 5 * MIB


def test_small_ones_are_counted_beside_the_pages_at_their_own_peak():
    """256 KiB are small: of two that do not live together, one counts."""
    pages = Pages()
    pages.free(pages.allocate(MIB // 4))
    pages.allocate(MIB // 4)
    assert pages.peak_bytes == MIB // 4
    pages.allocate(MIB)
    assert pages.peak_bytes == MIB + MIB // 4


def test_no_two_runs_overlap():
    rng, pages, taken = random.Random(0), Pages(), []
    for _ in range(3000):
        if taken and rng.random() < 0.5:
            pages.free(taken.pop(rng.randrange(len(taken))))
        else:
            taken.append(pages.allocate(int(2 ** rng.uniform(18.1, 24))))
        lying = sorted(taken, key=lambda block: block.address)
        assert all(one.address + one.num_bytes <= two.address for one, two in pairwise(lying))
        assert all(block.address % PAGE == 0 for block in lying)
        assert sum(block.num_bytes for block in lying) <= pages.peak_bytes
