"""The options and facts that a study's measurements depend on, so that a resumed study does not mix two kinds."""

from __future__ import annotations

import shlex
from typing import Any

from pydantic import ConfigDict, model_validator

from ...errors import StudyError
from ...measure.measurement import Quality
from ...plan import Budget
from ...techniques import TECHNIQUES, Facts
from ...units import format_bytes
from ...workers import Measured, Outcome
from ..budget import budget_words
from ..options import QUALITY, MeasuredBy, option_name
from ..verdict import Verdict, judge


class StudyRecord(MeasuredBy):
    """Everything that a study's measurements depend on: those under different records cannot be mixed."""

    model_config = ConfigDict(extra="ignore")

    task: str
    """The task as it was given."""
    command: tuple[str, ...] | None = None
    """What starts the job, where that is a script."""
    fingerprint: str
    """The task's fingerprint."""
    budget: Budget
    """Limit, device, margin."""
    space: dict[str, Any]
    """The search space, as plain data."""
    facts: Facts
    """What was known of the task when the study began: the choices follow from it."""

    @model_validator(mode="before")
    @classmethod
    def _says_of_quality_what_was_judged(cls, data: Any) -> Any:
        """Where quality is not judged, nothing depends on its options."""
        if not isinstance(data, dict) or data.get("max_quality_drop") is not None:
            return data
        return {name: value for name, value in data.items() if name not in QUALITY}

    @property
    def limit_bytes(self) -> int:
        """Limit for a peak with its margin: the budget, or all of the device's memory."""
        return self.budget.of_device or self.facts.device.memory_bytes

    @property
    def usable_bytes(self) -> float:
        """Limit for a peak without its margin."""
        return self.limit_bytes / (1 + self.budget.margin)

    def judge(self, outcome: Outcome, reference: Quality | None, is_reference: bool = False) -> Verdict:
        """The verdict on an outcome, by this budget and by the reference's quality where it is known."""
        peaks = [outcome.measurement.peak.process] if isinstance(outcome, Measured) else []
        budget = self.budget.of_job(*peaks) if is_reference else self.budget
        return judge(outcome, budget, self.facts.device.memory_bytes, reference, self.max_quality_drop)


def check_same(name: str, stored: StudyRecord, asked: StudyRecord) -> None:
    """Refuse to compare measurements of two tasks, budgets, machines or versions of torch."""
    if stored.fingerprint != asked.fingerprint:
        raise StudyError(
            f"--resume: study {name} belongs to another task ({stored.task}, {stored.fingerprint[:15]}…), "
            f"but got {asked.task} ({asked.fingerprint[:15]}…). Leave out --resume to begin another study."
        )
    different = [
        f"{what} was {before}, but is {now}"
        for (what, before), (_, now) in zip(
            _compared(stored, stored.facts), _compared(asked, stored.facts), strict=True
        )
        if before != now
    ]
    if different:
        raise StudyError(
            f"--resume: study {name} cannot go on: {'; '.join(different)}. "
            "Give the same options again, or leave out --resume to begin another study."
        )


def _tried(record: StudyRecord, known: Facts) -> dict[str, Any]:
    """The space, without what is ``auto`` and has one choice for this job, as it was known when the study began: a
    preset may have had no such row then."""
    left_out = {
        name
        for name, row in record.space.items()
        if row == "auto" and (name in known.left_out or len(TECHNIQUES[name].choices(known)) == 1)
    }
    return {name: row for name, row in record.space.items() if name not in left_out}


def _compared(record: StudyRecord, known: Facts) -> list[tuple[str, object]]:
    asked = record.budget if record.budget.of_reference is None else record.budget.model_copy(update={"limit": None})
    return [
        ("the command", shlex.join(record.command) if record.command else None),
        ("--budget", budget_words(asked)),
        ("--host-budget", None if asked.host is None else format_bytes(asked.host)),
        ("--max-latency", record.budget.latency_s),
        ("--margin", record.budget.margin),
        ("--device", record.budget.device),
        *((option_name(name), getattr(record, name)) for name in MeasuredBy.model_fields),
        ("--space", _tried(record, known)),
        ("batch_size", record.facts.effective_batch),
        ("micro_batch_size", record.facts.micro_batch),
        ("precision", record.facts.precision),
        ("max_grad_norm", record.facts.max_grad_norm),
        ("torch", record.facts.torch_version),
        ("the device", record.facts.device.name),
    ]
