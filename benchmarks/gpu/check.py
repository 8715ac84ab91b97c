"""What a check is, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .place import Place


class Skipped(Exception):
    """A check cannot run here; the words say why."""


@dataclass(frozen=True)
class Found:
    """What came of a check."""

    measured: str
    """In words."""
    is_within: bool
    """Whether it is within its bar."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """What the words rest on, as JSON has it."""


@dataclass(frozen=True)
class Check:
    """One claim of this package."""

    name: str
    bar: str
    """What is to be measured, in words."""
    run: Callable[[Place], Found]


def off(found: float, true: float) -> float:
    """How far off a figure is, as a share of the true one."""
    return abs(found / true - 1)
