"""The batch rules that a plan is compared with are those of the tools that they stand for."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from accelerate.utils import find_executable_batch_size

from benchmarks.batch_rules import auto_find_sizes, first_that_fits, power_sizes


@pytest.fixture
def _little_to_collect() -> Iterator[None]:
    """Accelerate collects garbage before each try, and this process holds much that is none."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_little_to_collect")
@pytest.mark.parametrize("largest", [1, 2, 7, 12, 13, 31, 32, 64])
def test_auto_find_comes_to_what_accelerate_comes_to(largest: int):
    """Accelerate's own loop, with an error above so many samples."""

    @find_executable_batch_size(starting_batch_size=64)
    def train(batch_size: int) -> int:
        if batch_size > largest:
            raise RuntimeError("CUDA out of memory.")
        return batch_size

    assert first_that_fits(auto_find_sizes(64), lambda size: size <= largest) == train()


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 100, 10_000])
def test_powers_of_two_come_to_what_doubling_from_two_comes_to(largest: int):
    """Lightning's rule, written out: double while it fits and the dataset of 100 is longer; halve once where not."""
    size = 2
    while size <= largest and size < 100:
        size *= 2
    expected = size if size <= largest else size // 2
    assert first_that_fits(power_sizes(100), lambda one: one <= largest) == expected


def test_nothing_fits():
    """None, and not the smallest."""
    assert first_that_fits(auto_find_sizes(8), lambda size: False) is None
