"""Random numbers of loader workers, for a DataLoader that reads its dataset in the training process instead."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data._utils.worker import _generate_state

from ..randomness import Randomness, alike, random_state

_NUM_LOOKED = 16
"""Batches after which a dataset that has drawn nothing is taken to draw nothing."""


class WorkerDraws:
    """Has batches read with the random numbers of the workers that would read them: augmentation draws what it draws in
    them, and the process's own numbers, by which the next epoch is shuffled, are as if there were workers.

    What a ``worker_init_fn`` seeds is not among them.
    """

    def __init__(self, num_workers: int, stay: bool) -> None:
        """
        Args:
            num_workers: how many there would be, at least 1.
            stay: whether they would go on with their numbers in a next epoch.
        """
        self._num_workers, self._stay = num_workers, stay
        self._streams: list[Randomness] = []
        self._draws, self._num_looked = False, 0

    @property
    def go_on(self) -> bool:
        """Whether the workers of the last epoch would go on in the next, which draws no seed for them."""
        return self._stay and bool(self._streams)

    def begin(self, iteration: Any) -> None:
        """An epoch.

        Args:
            iteration: a new one of a DataLoader without workers.
        """
        if not self.go_on:
            self._streams = [_of_worker(iteration._base_seed, number) for number in range(self._num_workers)]
        iteration._dataset_fetcher = _Fetcher(iteration._dataset_fetcher, self, itertools.cycle(self._streams))

    def read(self, fetcher: Any, places: Any, stream: Randomness) -> Any:
        """A batch."""
        if not self._draws and self._num_looked >= _NUM_LOOKED:
            return fetcher.fetch(places)
        with stream:
            before = None if self._draws else random_state()
            batch = fetcher.fetch(places)
            if before is not None:
                self._draws, self._num_looked = not alike(before, random_state()), self._num_looked + 1
        return batch


class _Fetcher:
    """In the place of torch's own."""

    def __init__(self, fetcher: Any, draws: WorkerDraws, streams: Iterator[Randomness]) -> None:
        self._fetcher, self._draws, self._streams = fetcher, draws, streams

    def fetch(self, places: Any) -> Any:
        """The samples there, collated."""
        return self._draws.read(self._fetcher, places, next(self._streams))


def _of_worker(base_seed: int, number: int) -> Randomness:
    """Source: ``_worker_loop`` of torch/utils/data/_utils/worker.py."""

    def seed_as_torch(seed: int) -> None:
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(_generate_state(base_seed, number))  # type: ignore[no-untyped-call]

    return Randomness(base_seed + number, seed_as_torch)
