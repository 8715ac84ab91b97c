"""The state of everything random: ``random``, numpy where it is loaded, and torch."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Randomness", "seed_everything", "undisturbed"]


def seed_everything(seed: int) -> None:
    """Seed ``random``, numpy where it is loaded, and torch on every device."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    torch.manual_seed(seed)


class Randomness:
    """A stream of random numbers of its own: in force within its block, and going on in the next."""

    def __init__(self, seed: int) -> None:
        with undisturbed():
            seed_everything(seed)
            self._own = _states()

    def __enter__(self) -> None:
        self._outer = _states()
        _restore(self._own)

    def __exit__(self, *exc: object) -> None:
        self._own = _states()
        _restore(self._outer)


@contextmanager
def undisturbed() -> Iterator[None]:
    """What is drawn within the block, or seeded, is as if it had not been."""
    before = _states()
    try:
        yield
    finally:
        _restore(before)


def _states() -> tuple[Any, Any, Any, Any]:
    numpy = sys.modules.get("numpy")
    on_device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return (
        random.getstate(),
        numpy.random.get_state() if numpy else None,
        torch.get_rng_state(),
        torch.cuda.get_rng_state() if on_device else None,
    )


def _restore(states: tuple[Any, Any, Any, Any]) -> None:
    own, of_numpy, of_torch, of_cuda = states
    random.setstate(own)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
    if of_cuda is not None:
        torch.cuda.set_rng_state(of_cuda)
