"""What the user asked of a search."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["SamplerName", "SearchOptions"]

SamplerName = Literal["law", "tpe", "gp", "random"]
"""``law`` is this package's own; the others are Optuna's."""


@dataclass(frozen=True)
class SearchOptions:
    """One search. Every field is a command-line option of ``autotune search``."""

    task: str
    """``model.py`` or ``model.py:name``."""
    budget_bytes: int | None = None
    """``--budget 8GiB``; None with no ``budget_share`` searches for speed alone."""
    budget_share: float | None = None
    """``--budget 90%``: the same as a share of the reference's measured peak."""
    output: Path = Path("plan.yaml")
    """``--output``."""
    device: Literal["cpu", "cuda"] = "cpu"
    """torch's device type that trials run on."""
    space: str = "default"
    """``--space``: a preset's name or a YAML file."""
    trials: int = 24
    """``--trials``: configurations to measure, the reference included, the finalists not."""
    max_time_s: float | None = None
    """``--max-time``: bounds everything, finalists included."""
    trial_time_s: float = 60.0
    """``--trial-time``: the time share of one trial's timed windows."""
    effective_batch: int | None = None
    """``--effective-batch``."""
    allow_split: bool = False
    """``--allow-split``."""
    margin: float = 0.03
    """``--margin``."""
    sampler: SamplerName = "law"
    """``--sampler``."""
    seed: int = 0
    """``--seed``."""
    storage: str | None = None
    """``--storage``: an Optuna storage URL; None is SQLite under ``.autotune/``."""
    resume: bool = False
    """``--resume``: go on with the newest study of this task in the storage."""
