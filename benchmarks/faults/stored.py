"""What a study's database holds, read from a copy, and what must hold between two looks at it."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sqlite3
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from .core import Complaints

_ATTRIBUTES = (
    "SELECT s.study_name, t.trial_id, a.key, a.value_json FROM trial_user_attributes a "
    "JOIN trials t ON a.trial_id = t.trial_id JOIN studies s ON t.study_id = s.study_id"
)
_EVIDENCE = (
    "SELECT s.study_name, a.key, a.value_json FROM study_user_attributes a JOIN studies s ON a.study_id = s.study_id "
    "WHERE a.key LIKE 'again:%' OR a.key LIKE 'fell:%'"
)


@dataclass(frozen=True)
class Stored:
    """Outcomes and evidence of every study of a file."""

    outcomes: dict[tuple[str, int], str] = field(default_factory=dict)
    """By study and trial's row: number, settings and outcome, as text."""
    evidence: dict[tuple[str, str], str] = field(default_factory=dict)

    def kinds(self) -> list[str]:
        """Each outcome's kind, finalists' included."""
        rows = [json.loads(text).get("outcome") for text in self.outcomes.values()]
        return [row["kind"] for row in [*rows, *map(json.loads, self.evidence.values())]]

    def spreads(self) -> list[float]:
        """Of each measured speed, half its interval over its value."""
        rows = [json.loads(text).get("outcome") for text in self.outcomes.values()]
        rows = [row for row in [*rows, *map(json.loads, self.evidence.values())] if row["kind"] == "measured"]
        speeds = [row["measurement"]["samples_per_s"] for row in rows]
        return [(speed["high"] - speed["low"]) / speed["value"] / 2 for speed in speeds]

    def numbers(self) -> set[int]:
        """Numbers of the trials that were measured, over all studies."""
        return {json.loads(text)["number"] for text in self.outcomes.values() if '"measured"' in text}

    def doubles(self) -> Complaints:
        """What was measured twice in one study."""
        rows = [(study, json.loads(text)) for (study, _), text in self.outcomes.items()]
        rows = [(study, row) for study, row in rows if row["outcome"].get("kind") == "measured"]
        numbers = Counter((study, row["number"]) for study, row in rows)
        settings = Counter((study, json.dumps(row["settings"], sort_keys=True)) for study, row in rows)
        return [f"stored twice: {key}" for count in (numbers, settings) for key, times in count.items() if times > 1]


def read(path: Path) -> Stored:
    """What is in a database; nothing where there is none that can be read."""
    found = Stored()
    if not path.is_file():
        return found
    with tempfile.TemporaryDirectory(prefix="autotune-faults-read-", dir="/var/tmp") as folder:
        copy = Path(folder) / "study.db"
        for ending in ("", "-wal"):
            with contextlib.suppress(OSError):
                shutil.copy(f"{path}{ending}", f"{copy}{ending}")
        with contextlib.suppress(sqlite3.Error, ValueError), contextlib.closing(sqlite3.connect(copy)) as database:
            rows: dict[tuple[str, int], dict[str, object]] = {}
            for study, trial, key, text in database.execute(_ATTRIBUTES):
                if key in ("number", "settings", "outcome"):
                    rows.setdefault((study, trial), {})[key] = json.loads(text)
            whole = {key: row for key, row in rows.items() if "outcome" in row}
            found.outcomes.update({key: json.dumps(row, sort_keys=True) for key, row in whole.items()})
            found.evidence.update({(study, key): text for study, key, text in database.execute(_EVIDENCE)})
    return found


def same_or_more(before: Stored, after: Stored) -> Complaints:
    """Complaints where something that was stored is lost or changed, or was measured twice."""
    pairs = ((before.outcomes, after.outcomes), (before.evidence, after.evidence))
    lost = [key for old, new in pairs for key in old if key not in new]
    changed = [key for old, new in pairs for key in old if key in new and old[key] != new[key]]
    found = [f"stored rows lost: {lost[:3]}"] if lost else []
    found += [f"stored rows changed: {changed[:3]}"] if changed else []
    return found + after.doubles()


def measured_again(before: Stored, said: str) -> Complaints:
    """Complaints where a search started what was measured before it began."""
    started = {int(number) for number in re.findall(r"\btrial (\d+) starts", said)}
    started |= {0} if re.search(r"\] reference( \(.*?\))? starts", said) else set()
    again = started & before.numbers()
    return [f"measured again: trials {sorted(again)}"] if again else []
