"""``search --progress``: what programs read of a search."""

from __future__ import annotations

import json

import pytest

from autotune.errors import UserError
from autotune.plan import Budget
from autotune.report.displays.lines import EventFile
from autotune.searches.events import BudgetKnown, SearchStarted, Stopped, TrialEnded, TrialStarted, Warned
from autotune.searches.options import SearchOptions
from autotune.techniques import Settings
from autotune.workers import OutOfMemory

OPTIONS = SearchOptions(task="model.py", budget=2**30)


def test_each_event_is_a_line_at_once(tmp_path):
    """What was measured before a resume is in the start's event, so that a reader lacks nothing."""
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "earlier"}\n')
    ended = TrialEnded(1, Settings(), OutOfMemory(peak_bytes=2**31, message="refused", seconds=2.0), False, False)
    file = EventFile(path, OPTIONS)
    file.observe(SearchStarted("model-1", 864, 24, (ended,)))
    assert len(path.read_text().splitlines()) == 2
    for event in (BudgetKnown(Budget(limit=2**30)), TrialStarted(2, Settings()), ended, Warned("so"), Stopped("done")):
        file.observe(event)
    _, started, budget, begun, row, warned, stopped = map(json.loads, path.read_text().splitlines())
    assert (started["event"], started["study"], started["num_trials"], started["limit_bytes"]) == (
        "search_started",
        "model-1",
        24,
        2**30,
    )
    assert (row["event"], row["number"], row["outcome"], row["peak_bytes"], row["fits"]) == (
        "trial_ended",
        1,
        "out_of_memory",
        2**31,
        False,
    )
    assert started["resumed"] == [{key: value for key, value in row.items() if key not in ("event", "time")}]
    assert (budget["limit_bytes"], begun["number"], begun["round"]) == (2**30, 2, None)
    assert (warned["words"], stopped["words"]) == ("so", "done")


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(UserError, match="--progress"):
        EventFile(tmp_path / "none" / "events.jsonl", OPTIONS)
