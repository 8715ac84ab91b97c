"""What is known of a search: a few figures while its driver works, and at its end the plan with what belongs to it."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import AutotuneError
from ..plan import Gain, Plan, load_plan
from ..report.printing import print_words
from ..report.show import explain
from ..units import size
from ..words import rate, settings_words, times

_WIDTH = 110
_KEPT = ("number", "settings", "words", "samples_per_s", "peak_bytes")


class Summary:
    """A search in a few figures, by its driver's events in their order: what lists and the page show."""

    def __init__(self, before: Mapping[str, Any] | None = None) -> None:
        """Go on from ``before``, which :meth:`as_json` gave."""
        self._said: dict[str, Any] = {"num_ended": 0, **(before or {})}
        self.has_started = False
        """Whether this attempt's driver has come as far as its trials."""

    def begin(self, at: float) -> None:
        """A driver begins: it goes through all phases."""
        self._said["phases"] = {}
        self._enter("reading the task", at)

    def take(self, row: Mapping[str, Any]) -> None:
        """Take an event in."""
        said, at = self._said, row.get("time")
        match row["event"]:
            case "inspected":
                said["task"] = row["words"]
                self._progress("reading the task", 1, 1, "done")
            case "search_started":
                self.has_started = True
                said |= {"study": row["study"], "num_trials": row["num_trials"], "num_ended": len(row["resumed"])}
                said["limit_bytes"] = row["limit_bytes"] or said.get("limit_bytes")
                for each in row["resumed"]:
                    self._trial(each)
                self._enter("trials", at)
                self._trials_ended()
            case "budget_known":
                said["limit_bytes"] = row["limit_bytes"]
            case "prediction_started":
                self._enter("predicting memory", at)
                self._progress("predicting memory", 0, row["num_configurations"])
            case "prediction_ended":
                self._progress("predicting memory", row["num_predicted"], row["num_configurations"])
                self._enter("trials", at)
            case "cuts_started":
                self._enter("judging cuts", at)
                self._progress("judging cuts", 0, row["num_cuts"])
            case "cuts_ended":
                self._progress("judging cuts", row["num_cuts"], row["num_cuts"])
                self._enter("trials", at)
            case "trial_started" if row.get("round") is not None:
                self._again(row, at)
            case "trial_started":
                self._enter("trials", at)
            case "trial_ended":
                said["num_ended"] += 1
                self._trial(row)
                self._trials_ended()
            case "stopped":
                self._trials_ended(f": {row['words']}")
                self._enter("measuring the best again", at)
            case "finalist_ended":
                self._again(row, at)
            case "ablation_started":
                self._enter("what each choice bought", at)
            case "ablation_ended":
                runs = said.setdefault("without", {}).setdefault(row["without"] or "", {})
                runs[str(row["round"])] = row.get("samples_per_s") or row["words"]
                self._progress("what each choice bought", row["round"], None, f"round {row['round']}")

    def _enter(self, name: str, at: float | None) -> None:
        self._said["phase"] = name
        self._said.setdefault("phases", {}).setdefault(name, {"since": at, "done": 0, "of": None, "words": ""})

    def _progress(self, name: str, done: int, most: int | None, words: str | None = None) -> None:
        """How far a phase is; ``most`` is None where that is not known before its end."""
        phase = self._said.setdefault("phases", {}).setdefault(name, {"since": None})
        phase |= {"done": done, "of": most, "words": f"{done} of {most}" if words is None else words}

    def _trials_ended(self, why: str = "") -> None:
        done, most = self._said["num_ended"], self._said["num_trials"]
        self._progress("trials", done, most, f"{done} of {most}{why}")

    def _again(self, row: Mapping[str, Any], at: float | None) -> None:
        """A run of a finalist or of the reference, in a round: the first, 0, chooses among the finalists."""
        name, number = "measuring the best again", row["round"]
        self._enter(name, at)
        most = row.get("num_rounds") or self._said["phases"][name]["of"]
        words = f"round {number}" + (f" of {most}" if most else "") if number else "to choose among them"
        self._progress(name, number, most, words)

    def _trial(self, row: Mapping[str, Any]) -> None:
        kept = {name: row[name] for name in _KEPT if name in row}
        if row["number"] == 0:
            self._said["reference"] = kept
        if row["is_best"]:
            self._said["best"] = kept

    def as_json(self) -> dict[str, Any]:
        """The figures."""
        return self._said


@dataclass(frozen=True)
class Documents:
    """A plan, and what belongs to it."""

    plan: str
    """YAML."""
    report: str | None = None
    """As ``autotune show`` prints it."""
    files: dict[str, str] = field(default_factory=dict)
    """What the plan's settings keep beside it: by name, in base64."""
    result: dict[str, Any] = field(default_factory=dict)
    """What it comes to, in figures and words: what lists and the page begin with."""


def read_documents(path: Path) -> Documents | None:
    """The plan at ``path`` with what belongs to it; None where there is none that can be read."""
    try:
        plan = load_plan(path)
        text = path.read_text(encoding="utf-8")
    except (AutotuneError, OSError, ValueError):
        return None
    words = io.StringIO()
    print_words(words, explain(plan, Path(path.name), coloured=False), _WIDTH)
    files = {name: base64.b64encode(content).decode() for name, content in plan.settings.files().items()}
    return Documents(text, words.getvalue(), files, result_of(plan))


def result_of(plan: Plan) -> dict[str, Any]:
    """The gain over the job as it stands with its interval, and the peak against the budget: figures, and ``words``."""
    gain = plan.gain or Gain(speed=None, memory=None)
    found: dict[str, Any] = {"settings": settings_words(plan.settings), "is_proven": gain.is_proven}
    found |= {"gain": gain.speed, "low": gain.low, "high": gain.high, "why": gain.unproven or gain.reason}
    said = [f"{times(gain.speed)} the reference's speed{_sureness(gain)}"] if gain.speed is not None else []
    if plan.measured is not None:
        speed, peak, limit = plan.measured.samples_per_s.value, plan.measured.peak.process, plan.budget.limit
        found |= {"samples_per_s": speed, "peak_bytes": peak, "limit_bytes": limit}
        said += [] if said else [f"{rate(speed)} samples/s, no gain is known"]
        said.append(f"peak {size(peak)}" + (f" of {size(limit)} ({peak / limit:.0%})" if limit else ""))
    if plan.reference is not None:
        before, fits = plan.reference, plan.reference.fits
        found["reference"] = {"samples_per_s": before.samples_per_s.value, "peak_bytes": before.peak.process}
        found["reference"]["fits"] = fits
        said += [] if fits else [f"the job as it stands takes {size(before.peak.process)}, over the budget"]
    return {**found, "words": "; ".join(said) or "settings without evidence"}


def _sureness(gain: Gain) -> str:
    interval = "" if gain.low is None or gain.high is None else f"95 %: {times(gain.low)} to {times(gain.high)}"
    return f" ({', '.join(filter(None, (interval, '' if gain.is_proven else 'not proven')))})"
