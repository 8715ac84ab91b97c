"""The state of everything random: ``random``, numpy where it is loaded, and torch."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def seed_everything(seed: int) -> None:
    """Seed ``random``, numpy where it is loaded, and torch on every device."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    torch.manual_seed(seed)


class Randomness:
    """A stream of random numbers of its own: active within its block, and going on in the next."""

    def __init__(self, seed: int, put: Callable[[int], None] = seed_everything) -> None:
        with undisturbed():
            put(seed)
            self._own = random_state()

    def __enter__(self) -> None:
        self._outer = random_state()
        set_random_state(self._own)

    def __exit__(self, *exc: object) -> None:
        self._own = random_state()
        set_random_state(self._outer)


@contextmanager
def undisturbed() -> Iterator[None]:
    """What is drawn within the block, or seeded, is as if it had not been."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


def random_state() -> dict[str, Any]:
    """The state of all of them, made of what ``torch.load(weights_only=True)`` reads; None for those not in use.

    Of CUDA devices it is the current one's.
    """
    numpy = sys.modules.get("numpy")
    on_device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "python": random.getstate(),
        "numpy": _of_numpy(numpy.random.get_state()) if numpy else None,
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if on_device else None,
    }


def alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the same numbers come of two states, on the CPU."""
    return all(_bytes_of(one[name]) == _bytes_of(other[name]) for name in ("python", "numpy", "torch"))


def set_random_state(state: dict[str, Any]) -> None:
    """Go on from a :func:`random_state`; those that were not in use are left alone, and a device that is not there."""
    random.setstate(state["python"])
    if state["numpy"] is not None:
        name, key, *rest = state["numpy"]
        importlib.import_module("numpy").random.set_state((name, key.cpu().numpy().astype("uint32"), *rest))
    torch.set_rng_state(state["torch"].cpu())  # a checkpoint may have been mapped to a device
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def _bytes_of(state: Any) -> Any:
    if isinstance(state, tuple):
        return tuple(map(_bytes_of, state))
    return state.tolist() if isinstance(state, torch.Tensor) else state


def _of_numpy(state: tuple[Any, ...]) -> tuple[Any, ...]:
    name, key, *rest = state
    return (name, torch.from_numpy(key.astype("int64")), *rest)
