"""``Tried``: a configuration with what came of it; and an outcome as a study keeps it."""

from __future__ import annotations

from dataclasses import dataclass

from ...techniques import Settings
from ...workers import Measured, Outcome
from ..verdict import Verdict

_KEPT_OUTPUT = 2048
"""Characters of a trial's output that the study keeps, from either end; its log has all."""


@dataclass(frozen=True)
class Tried:
    """A configuration and its outcome."""

    number: int
    """Counts measured configurations from 0, the reference."""
    settings: Settings
    outcome: Outcome
    verdict: Verdict
    known: bool = False
    """Whether another search measured it."""

    @property
    def applied(self) -> Settings:
        """The settings with what was decided as they were applied, so that the same is measured again."""
        decided = self.outcome.applied if isinstance(self.outcome, Measured) else None
        return decided or self.settings

    @property
    def has_quality(self) -> bool:
        """Whether its quality was measured."""
        return isinstance(self.outcome, Measured) and self.outcome.measurement.quality is not None


def trimmed(outcome: Outcome) -> Outcome:
    """The outcome with only the ends of its output."""
    text = outcome.output
    if len(text) <= 2 * _KEPT_OUTPUT:
        return outcome
    cut = f"{text[:_KEPT_OUTPUT]}\n… {len(text) - 2 * _KEPT_OUTPUT} characters left out …\n{text[-_KEPT_OUTPUT:]}"
    return outcome.model_copy(update={"output": cut})
