"""``Samples``: a data set of so many samples of one kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset

_NUM_SAMPLES = 4096


class Samples(Dataset[Any]):
    """So many of one kind."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __len__(self) -> int:
        return _NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self._make()
