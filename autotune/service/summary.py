"""A search in a few figures, kept up to date by its driver's events: what lists and the page show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEPT = ("number", "settings", "words", "samples_per_s", "peak_bytes")


class Summary:
    """Consumes events in order."""

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
