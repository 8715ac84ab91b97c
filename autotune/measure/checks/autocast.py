"""Notices, or prevents, that a model or its loss turns autocast on by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class AutocastSeen:
    """What was noticed so far."""

    turned_on: bool = False


@contextmanager
def autocast_seen(device_type: str) -> Iterator[AutocastSeen]:
    """Within the block, notice whether autocast is turned on for this type of device."""
    seen = AutocastSeen()

    def note(enabled: bool) -> bool:
        seen.turned_on = seen.turned_on or enabled
        return enabled

    with _intercepted(device_type, note):
        yield seen


@contextmanager
def autocast_kept_off(device_type: str) -> Iterator[None]:
    """Within the block, turning autocast on for this type of device leaves it off."""
    with _intercepted(device_type, lambda enabled: False):
        yield


@contextmanager
def _intercepted(device_type: str, decide: Callable[[bool], bool]) -> Iterator[None]:
    """``torch.autocast`` as a block or a decorator, its older names, and whoever builds on them (accelerate,
    transformers, lightning) all end in ``torch.set_autocast_enabled``, which is replaced for the whole process.

    Source: torch/amp/autocast_mode.py, autocast.__enter__
    """
    real = torch.set_autocast_enabled

    def set_autocast_enabled(*args: Any) -> None:
        *kind, enabled = args
        named = str(kind[0]) if kind else "cuda"  # where the type of device is left out, it is this
        real(named, decide(enabled) if named == device_type else enabled)

    setattr(torch, real.__name__, set_autocast_enabled)
    try:
        yield
    finally:
        setattr(torch, real.__name__, real)
