"""How many threads a training is to compute with."""

from __future__ import annotations

import torch

__all__ = ["num_threads", "reckon_with"]

_num_threads: int | None = None
"""Where it is not as many as this process does."""


def reckon_with(num_threads: int) -> None:
    """Say that a training is to compute with so many threads, whatever this process does."""
    global _num_threads
    _num_threads = num_threads


def num_threads() -> int:
    """That a training computes with."""
    return _num_threads or torch.get_num_threads()
