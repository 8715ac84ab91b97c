"""The options of a search."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SamplerName = Literal["gain", "tpe", "gp", "random"]
"""``gain`` is this package's own; the others are Optuna's."""


@dataclass(frozen=True)
class Drop:
    """How far the quality that ``evaluate`` returns may fall."""

    value: float
    """At least 0."""
    is_share: bool
    """Whether ``value`` is a share of the reference's quality; else it is in its units."""

    def of(self, reference: float) -> float:
        """The allowed drop in units of the quality."""
        return self.value * abs(reference) if self.is_share else self.value

    def __str__(self) -> str:
        return f"{100 * self.value:g}%" if self.is_share else f"{self.value:g}"


ANY_DROP = Drop(1.0, is_share=True)
"""For commands that only look at what lossy techniques do, or use a plan whose quality was judged before."""


@dataclass(frozen=True)
class SearchOptions:
    """One search. Every field is a command-line option of ``autotune search``."""

    task: str
    """``model.py`` or ``model.py:name``."""
    command: tuple[str, ...] | None = None
    """The job is the script that this starts, with the batch's placeholders in it; ``task`` is then its name."""
    flags: Literal["auto", "off"] = "auto"
    """``--flags``: whether a command without placeholders is searched by the flags that are known to take a batch."""
    scratch: Literal["auto", "copy", "empty", "off"] = "auto"
    """``--scratch``: trials of a script run in a folder of their own, a copy of the current one or empty; ``auto`` is a
    copy of a small one."""
    budget_bytes: int | None = None
    """``--budget 8GiB``; None with no ``budget_share`` searches for speed alone."""
    budget_share: float | None = None
    """``--budget 90%``: the same as a share of the reference's measured peak."""
    name: str | None = None
    """Of the study and of the folder of its logs; None is the task file's, without its suffix."""
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
    max_quality_drop: Drop | None = None
    """``--max-quality-drop``; None tries nothing that changes what the model computes."""
    recovery_steps: int = 100
    """``--recovery-steps``: optimizer steps of training before quality is judged, the reference's too."""
    recovery_lr: float = 1.0
    """``--recovery-lr``: times the task's learning rates meanwhile, the reference's too."""
    distill: bool = False
    """``--distill``: candidates learn from the untouched model too, meanwhile."""
    keep_weights: bool = False
    """``--keep-weights``: write what recovery made of the winner beside the plan."""
    margin: float = 0.03
    """``--margin``."""
    sampler: SamplerName = "gain"
    """``--sampler``."""
    seed: int = 0
    """``--seed``."""
    storage: str | None = None
    """``--storage``: an Optuna storage URL; None is SQLite under ``.autotune/``."""
    ablate: bool = False
    """``--ablate``: once the plan is written, measure what each of its choices bought."""
    require_proof: bool = False
    """``--require-proof``: end with 3 where the plan is not known to be faster than the job as it stands."""
    resume: bool = False
    """``--resume``: go on with the newest study of this task in the storage."""
    progress: Path | None = None
    """``--progress``: a file that gets one JSON line for each event."""

    @property
    def stem(self) -> str:
        """Prefix of the study's name."""
        return self.name or Path(self.task).stem

    @property
    def preset(self) -> str:
        """Name of the space: ``default`` becomes ``lossy`` with ``--max-quality-drop``."""
        return "lossy" if self.space == "default" and self.max_quality_drop is not None else self.space
