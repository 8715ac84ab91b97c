"""How many threads the predicted training computes with."""

from __future__ import annotations

import torch

_num_threads: int | None = None
"""None where it is as many as this process has."""


def reckon_with(num_threads: int) -> None:
    """Set how many threads the predicted training computes with, whatever this process has."""
    global _num_threads
    _num_threads = num_threads


def num_threads() -> int:
    """Threads of the predicted training."""
    return _num_threads or torch.get_num_threads()
