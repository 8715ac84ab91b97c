"""What commands are asked for and what they find, as plain data: ``report`` puts it into words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .estimates import Calibration, Estimate
from .estimates.cards import Card
from .measure.profiling.types import Profile
from .plan import Evaluation, Evidence, Inference, Plan
from .script.scratch import Scratch
from .search_spaces import Unavailable
from .searches.options import SearchOptions
from .searches.predicted.duration import Expected
from .techniques import Facts, Settings, Technique
from .workers import Estimated, Outcome, Profiled


@dataclass(frozen=True)
class Preview:
    """A search that has not begun."""

    facts: Facts
    """What is known of the task."""
    choices: Mapping[str, tuple[Technique, ...]]
    """What may be tried, by technique."""
    unavailable: tuple[Unavailable, ...]
    """What the space names and cannot be had."""
    conflicts: Mapping[str, int]
    """Why combinations of choices are left out, and how many."""
    num_configurations: int
    """Size of the space, the reference included."""
    num_trials: int
    """Configurations that would be measured."""
    num_likely: int
    """Of those, how many the sampler likely takes before it stops by itself."""
    expected: Expected
    """How long it would take, finalists included."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """What the space has and the job is searched without, and why."""


@dataclass(frozen=True)
class Verification:
    """A plan, measured again."""

    measured: Evidence | None
    """What it cost now; None where it ran out of memory."""
    over_budget: str | None
    """By how much, or that it leaks, in words; None where it holds."""
    slower: str | None
    """By how much, in words; None where it is as fast as stated, or nothing is stated."""
    warnings: tuple[str, ...]
    """What else is not as it was: another torch, another device."""
    evaluation: Evaluation | None = None
    """What the task's evaluation took, which the peak includes."""
    bytes_by_rank: tuple[int, ...] = ()
    """Of several processes, the largest that each was charged, in their order."""
    deviation: float | None = None
    """Of inference: how far outputs are from those of the job as it stands, as a share of them; None of training."""
    inferred: Inference | None = None
    """Of inference whose quality is judged: it, and that of the job as it stands."""

    @property
    def holds(self) -> bool:
        """Whether the plan stays within its budget."""
        return self.over_budget is None


@dataclass(frozen=True)
class PreviewedJob:
    """One job of a batch, before anything of it is measured."""

    options: SearchOptions
    preview: Preview | None
    """None where it would fail."""
    num_known: int = 0
    """Configurations that are known already, or will be by then."""
    why: str = ""
    """What it waits for, or why it would fail."""


@dataclass(frozen=True)
class WhatToProfile:
    """What the user asked for. Every field is a command-line option of ``autotune profile``."""

    task: str
    """``model.py`` or ``model.py:name``."""
    device: Literal["cpu", "cuda"]
    """torch's device type."""
    plan: Plan | None = None
    """``--plan``: its settings are applied; None is the job as it stands."""
    batch: int | None = None
    """``--batch``: samples in one forward pass, and in one optimizer step; None is the plan's or the task's."""
    alone: bool = False
    """``--alone``: without asking what each technique would change."""
    trace: Path | None = None
    """``--trace``: a Chrome trace of the job, besides."""
    seed: int = 0
    """``--seed``."""


@dataclass(frozen=True)
class Change:
    """The same step with one technique changed."""

    technique: Technique
    """The only setting that differs."""
    outcome: Outcome
    """``Profiled``, or why not."""

    @property
    def profile(self) -> Profile | None:
        """The step; None where it did not come to its end."""
        return self.outcome.profile if isinstance(self.outcome, Profiled) else None


@dataclass(frozen=True)
class Profiling:
    """A step, and what each technique would make of it."""

    task: str
    settings: Settings
    """In force."""
    facts: Facts
    base: Profile
    changes: tuple[Change, ...]
    not_measured: tuple[Technique, ...] = ()
    """What the user's Ctrl-C left out."""


@dataclass(frozen=True)
class WhatToEstimate:
    """What the user asked for. Every field is a command-line option of ``autotune estimate``."""

    task: str
    """``model.py`` or ``model.py:name``, or a script's name."""
    budget_bytes: int | None = None
    """``--budget``; None is all of the device's memory."""
    device: Literal["cpu", "cuda"] = "cpu"
    """The device type that is planned for; it need not be here."""
    device_memory_bytes: int | None = None
    """``--device-memory``: of the CUDA device that is planned for."""
    cards: tuple[Card, ...] = ()
    """``--card``: those that are planned for; one alone is looked at with each technique."""
    is_here: bool = False
    """A card that is planned for is this machine's own."""
    space: str = "default"
    """``--space``: a preset's name or a YAML file."""
    effective_batch: int | None = None
    """``--effective-batch``."""
    storage: str | None = None
    """``--storage``: where studies are, whose trials calibrate the estimate; None is SQLite under ``.autotune/``."""
    command: tuple[str, ...] | None = None
    """Of ``autotune fit``: what starts the script."""
    scratch: Scratch = "auto"
    """The same: the folder that it runs in."""
    techniques: tuple[str, ...] | None = None
    """The same: ``--techniques``; None are those that trade time for memory."""

    @property
    def limit_bytes(self) -> int | None:
        """What the process may be charged, as far as the user said."""
        sizes = [self.budget_bytes, self.device_memory_bytes]
        if len(self.cards) == 1:
            sizes.append(self.cards[0].device.memory_bytes)
        return min((size for size in sizes if size is not None), default=None)


@dataclass(frozen=True)
class Combination:
    """Some techniques together, and what they take."""

    settings: Settings
    """Without a batch."""
    outcome: Outcome
    """``Estimated``, or why not."""

    @property
    def estimate(self) -> Estimate | None:
        """None where it could not be had."""
        return self.outcome.estimate if isinstance(self.outcome, Estimated) else None

    @property
    def micro(self) -> int:
        """The largest micro-batch that is likely to fit; 0 where none is."""
        return self.estimate.largest.micro if self.estimate is not None and self.estimate.largest is not None else 0

    @property
    def num_changes(self) -> int:
        """Techniques that differ from the job as it stands."""
        return len(self.settings.model_dump(exclude_defaults=True))


@dataclass(frozen=True)
class Estimation:
    """All of them."""

    what: WhatToEstimate
    facts: Facts
    limit_bytes: int
    """What the device may charge the process."""
    combinations: tuple[Combination, ...]
    """The job as it stands first, then by the number of techniques."""
    calibration: Calibration | None = None
    """What a search's trials have shown of such predictions."""
    study: str | None = None
    """The study that they are of."""
    uncalibrated: str | None = None
    """Why a study that is there says nothing."""

    @property
    def base(self) -> Combination:
        """The job as it stands."""
        return self.combinations[0]

    def distinct(self) -> list[Combination]:
        """Those that do not take just what one before them takes."""
        found: dict[object, Combination] = {}
        for one in self.combinations:
            estimate = one.estimate
            key = one.settings if estimate is None else (one.micro, estimate.surely, estimate.reference.tensors.value)
            found.setdefault(key, one)
        return list(found.values())

    def lossy(self) -> list[Combination]:
        """Each technique alone that changes the function, where it was estimated."""
        alone = (one for one in self.combinations if one.num_changes == 1 and one.settings.affect("function"))
        return [one for one in alone if one.estimate is not None]

    def helps(self) -> list[Combination]:
        """Each technique alone, where it lets a larger micro-batch fit than the job as it stands: the most first."""
        alone = (one for one in self.distinct() if one.num_changes == 1 and one.micro > self.base.micro)
        return sorted(alone, key=lambda one: -one.micro)


@dataclass(frozen=True)
class OnCard:
    """The job as it stands, on one card."""

    card: Card
    estimate: Estimate


@dataclass(frozen=True)
class CardsEstimation:
    """The job as it stands on several cards, in the order in which they were asked for."""

    what: WhatToEstimate
    facts: Facts
    rows: tuple[OnCard, ...]
