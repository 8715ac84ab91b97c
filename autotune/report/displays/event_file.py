"""``--progress``: one JSON object on a line of a file for each event of a search, for programs that watch it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...searches.events import (
    AblationEnded,
    AblationStarted,
    AnchorEnded,
    AnchorStarted,
    BudgetKnown,
    Event,
    FinalistEnded,
    Inspected,
    PredictionEnded,
    PredictionStarted,
    SearchStarted,
    SecondsKnown,
    Stopped,
    TrialEnded,
    TrialStarted,
    Warned,
)
from ...searches.options import SearchOptions
from ...words import facts_words, outcome_words, settings_words
from ...workers import Measured, Outcome, OutOfMemory
from .progress import Progress


class EventFile:
    """Appends what happens, each line at once: what follows the file sees whole lines, whatever becomes of the search.

    An object has ``event`` (its kind), ``time`` (seconds since 1970) and what the kind has; sizes are bytes.
    """

    def __init__(self, path: Path, options: SearchOptions) -> None:
        """Open it.

        Raises:
            UserError: it cannot be written.
        """
        self._progress = Progress(options)
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as reason:
            raise UserError(
                f"--progress {path}: it cannot be written: {reason.strerror}. Choose another file."
            ) from None

    def observe(self, event: Event) -> None:
        """Append an event. A full disk ends no search: the line is lost."""
        self._progress.observe(event)
        row = {"event": _KINDS[type(event)], "time": time.time(), **self._said(event)}
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        except OSError:
            pass

    def _said(self, event: Event) -> dict[str, Any]:
        progress = self._progress
        match event:
            case Inspected(facts):
                return {"words": facts_words(facts)}
            case BudgetKnown(budget):
                return {"limit_bytes": budget.limit, "margin": budget.margin}
            case SearchStarted(study, num_configurations, num_trials, resumed):
                rows = [self._trial(each) for each in resumed]
                return {
                    "study": study,
                    "num_configurations": num_configurations,
                    "num_trials": num_trials,
                    "limit_bytes": progress.budget.limit,
                    "resumed": rows,
                }
            case SecondsKnown(spent):
                return {"spent": {done: dict(phases) for done, phases in spent.items()}}
            case Warned(message) | Stopped(message):
                return {"words": message}
            case PredictionStarted(num_configurations):
                return {"num_configurations": num_configurations}
            case PredictionEnded(num_predicted, num_configurations):
                return {"num_predicted": num_predicted, "num_configurations": num_configurations}
            case TrialStarted(number, settings, finalist_round):
                words = settings_words(settings, progress.facts)
                return {"number": number, "round": finalist_round, "settings": words}
            case TrialEnded():
                return self._trial(event)
            case FinalistEnded(number, settings, round, outcome, num_rounds):
                words = settings_words(settings, progress.facts)
                return {
                    "number": number,
                    "round": round,
                    "num_rounds": num_rounds,
                    "settings": words,
                    **self._outcome(outcome),
                }
            case AnchorStarted():
                return {}
            case AnchorEnded(_, _, outcome, shift):
                return {"shift": shift, **self._outcome(outcome)}
            case AblationStarted(without, round, settings):
                return {"without": without, "round": round, "settings": settings_words(settings, progress.facts)}
            case AblationEnded(without, round, settings, outcome):
                words = settings_words(settings, progress.facts)
                return {"without": without, "round": round, "settings": words, **self._outcome(outcome)}

    def _trial(self, event: TrialEnded) -> dict[str, Any]:
        words = settings_words(event.settings, self._progress.facts)
        return {
            "number": event.number,
            "settings": words,
            "fits": event.feasible,
            "is_best": event.is_best,
            **self._outcome(event.outcome),
        }

    def _outcome(self, outcome: Outcome) -> dict[str, Any]:
        said = {
            "outcome": outcome.kind,
            "words": outcome_words(outcome, self._progress.budget),
            "seconds": outcome.seconds,
        }
        if isinstance(outcome, Measured):
            measured = outcome.measurement
            speed = measured.samples_per_s
            said |= {
                "samples_per_s": speed.value,
                "samples_per_s_low": speed.low,
                "samples_per_s_high": speed.high,
                "peak_bytes": measured.peak.process,
            }
        if isinstance(outcome, OutOfMemory):
            said["peak_bytes"] = outcome.peak_bytes
        return said


_KINDS: dict[type[Event], str] = {
    Inspected: "inspected",
    BudgetKnown: "budget_known",
    SearchStarted: "search_started",
    Warned: "warned",
    PredictionStarted: "prediction_started",
    PredictionEnded: "prediction_ended",
    TrialStarted: "trial_started",
    TrialEnded: "trial_ended",
    AnchorStarted: "anchor_started",
    AnchorEnded: "anchor_ended",
    AblationStarted: "ablation_started",
    AblationEnded: "ablation_ended",
    FinalistEnded: "finalist_ended",
    Stopped: "stopped",
    SecondsKnown: "seconds_known",
}
"""The names of events in the file: other programs go by them."""
