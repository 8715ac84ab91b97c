"""What is known of a search: a few figures while its driver works, and at its end the plan with what belongs to it."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import AutotuneError
from ..plan import load_plan
from ..report.printing import print_words
from ..report.show import explain

_WIDTH = 110
_KEPT = ("number", "settings", "words", "samples_per_s", "peak_bytes")


class Summary:
    """A search in a few figures, by its driver's events in their order: what lists and the page show."""

    def __init__(self, before: Mapping[str, Any] | None = None) -> None:
        """Go on from ``before``, which :meth:`as_json` gave."""
        self._said: dict[str, Any] = {"num_ended": 0, "phase": "starting", **(before or {})}
        self.has_started = False
        """Whether this attempt's driver has come as far as its trials."""

    def take(self, row: Mapping[str, Any]) -> None:
        """Take an event in."""
        said = self._said
        match row["event"]:
            case "inspected":
                said["task"] = row["words"]
            case "search_started":
                self.has_started = True
                said |= {"study": row["study"], "num_trials": row["num_trials"], "num_ended": len(row["resumed"])}
                said["limit_bytes"] = row["limit_bytes"] or said.get("limit_bytes")
                said["phase"] = "trials"
                for each in row["resumed"]:
                    self._trial(each)
            case "budget_known":
                said["limit_bytes"] = row["limit_bytes"]
            case "prediction_started":
                said["phase"] = "predicting memory"
            case "prediction_ended":
                said["phase"] = "trials"
            case "trial_ended":
                said["num_ended"] += 1
                self._trial(row)
            case "stopped":
                said["phase"] = "measuring the best again"
            case "ablation_started":
                said["phase"] = "measuring what each choice bought"
            case "ablation_ended":
                runs = said.setdefault("without", {}).setdefault(row["without"] or "", {})
                runs[str(row["round"])] = row.get("samples_per_s") or row["words"]

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
    return Documents(text, words.getvalue(), files)
