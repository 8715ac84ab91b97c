"""Events say themselves: each kind's plain line, and its row in the file of ``--progress``."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from screen import printed
from search_tables import BF16, MIB, REFERENCE, facts, measurement

from autotune import service
from autotune.plan import Budget
from autotune.report.displays.lines import EventFile, line
from autotune.report.displays.live import draw
from autotune.report.displays.progress import Progress
from autotune.searches import events
from autotune.searches.event_base import Event, RunEnded, RunStarted
from autotune.searches.options import SearchOptions
from autotune.techniques import Settings
from autotune.words import facts_words
from autotune.workers import Measured, Outcome, OutOfMemory

OPTIONS = SearchOptions(task="model.py", budget=512 * MIB)
FACTS = facts()
MEASURED = Measured(measurement=measurement(80.0, 0.8, process=400 * MIB), seconds=1.0)
REFUSED = OutOfMemory(peak_bytes=640 * MIB, message="refused", seconds=2.0)

REFERENCE_ENDED = events.TrialEnded(
    0, REFERENCE, Measured(measurement=measurement(40.0, process=300 * MIB), seconds=1.0), True, True
)
SPEED = "80.0 samples/s ± 1.0 %, 400 MiB"
FIGURES = {
    "outcome": "measured",
    "words": SPEED,
    "seconds": 1.0,
    "samples_per_s": 80.0,
    "samples_per_s_low": 79.2,
    "samples_per_s_high": 80.8,
    "peak_bytes": 400 * MIB,
}
OUT = {
    "outcome": "out_of_memory",
    "words": "out of memory at 640 MiB: refused",
    "seconds": 2.0,
    "peak_bytes": 640 * MIB,
}
TRIAL_ROW = {"number": 3, "settings": "batch 64, bf16", "fits": True, "is_best": True, **FIGURES}
SAID: list[tuple[Event, str, dict[str, Any]]] = [
    (events.TaskRead(FACTS), f"task: {facts_words(FACTS)}", {"words": facts_words(FACTS)}),
    (events.Warned("so"), "note: so", {"words": "so"}),
    (
        events.TrialStarted(0, REFERENCE),
        "reference (the job as it stands) starts: batch 64",
        {"number": 0, "round": None, "settings": "batch 64"},
    ),
    (
        events.TrialStarted(3, BF16, 1, by_turns=True),
        "trial 3 again and the reference by turns, round 1, start in fresh processes: batch 64, bf16",
        {"number": 3, "round": 1, "settings": "batch 64, bf16"},
    ),
    (
        events.TrialEnded(3, BF16, MEASURED, True, True),
        f"trial 3: {SPEED} · 2.00x the reference (best so far)",
        TRIAL_ROW,
    ),
    (
        events.TrialEnded(4, BF16, REFUSED, False, False),
        "trial 4: out of memory at 640 MiB: refused",
        {"number": 4, "settings": "batch 64, bf16", "fits": False, "is_best": False, **OUT},
    ),
    (
        events.SearchStarted("model-1", 96, 24, (events.TrialEnded(3, BF16, MEASURED, True, True),)),
        "study model-1: up to 24 of 96 configurations are tried, 1 of them done before",
        {
            "study": "model-1",
            "num_configurations": 96,
            "num_trials": 24,
            "limit_bytes": 512 * MIB,
            "resumed": [TRIAL_ROW],
        },
    ),
    (
        events.BudgetKnown(Budget(limit=512 * MIB, of_reference=0.9)),
        "budget: 512 MiB (90% of the reference's peak)",
        {"limit_bytes": 512 * MIB, "margin": 0.03},
    ),
    (
        events.QualityKnown(0.975, 360, 0.00975, 0.0081),
        "quality: 0.975, of which 0.00975 may be lost; 6 pairs of 360 examples can prove a loss of about 0.0081",
        {"value": 0.975, "num_examples": 360, "allowed": 0.00975, "provable": 0.0081},
    ),
    (
        events.QualityKnown(0.975, None, 0.00975, 0.019),
        "quality: 0.975, of which 0.00975 may be lost. By the standard error that evaluate returns, 6 pairs can prove "
        "a loss of 0.019 at best; a score for each example would prove less",
        {"value": 0.975, "num_examples": None, "allowed": 0.00975, "provable": 0.019},
    ),
    (
        events.QualityKnown(0.975, None, 0.00975, None),
        "quality: 0.975, of which 0.00975 may be lost. evaluate returns a number alone: what is proven holds over "
        "seeds, for the examples that it has; how far others may differ is not known. A score for each example would "
        "tell",
        {"value": 0.975, "num_examples": None, "allowed": 0.00975, "provable": None},
    ),
    (
        events.PredictionStarted(36),
        "predicting the memory and work of 36 configurations, without running them",
        {"num_configurations": 36},
    ),
    (events.PredictionEnded(30, 36), "predicted: 30 of 36", {"num_predicted": 30, "num_configurations": 36}),
    (
        events.CutsStarted(14),
        "judging 14 cuts of the model in one process, beside the job as it stands",
        {"num_cuts": 14},
    ),
    (
        events.CutsEnded(14, ((BF16, 2.1, -0.001), (BF16, 1.5, 0.0))),
        "14 cuts tried, 2 on the front: 2.1x at -0.10% of the quality (batch 64, bf16); 1.5x at +0.00% of the quality "
        "(batch 64, bf16)",
        {
            "num_cuts": 14,
            "front": [
                {"settings": "batch 64, bf16", "speed": 2.1, "quality": -0.001},
                {"settings": "batch 64, bf16", "speed": 1.5, "quality": 0.0},
            ],
        },
    ),
    (
        events.CutsEnded(3, ()),
        "3 cuts tried, none of them within what may be lost",
        {"num_cuts": 3, "front": []},
    ),
    (
        events.FinalistEnded(3, BF16, 2, MEASURED, 3),
        f"trial 3 again, round 2 of 3: {SPEED}",
        {"number": 3, "round": 2, "num_rounds": 3, "settings": "batch 64, bf16", **FIGURES},
    ),
    (events.AnchorStarted(0, REFERENCE), "reference again, as an anchor starts: trials are compared with it", {}),
    (
        events.AnchorEnded(0, REFERENCE, MEASURED, 0.5),
        f"reference again, as an anchor: {SPEED}; since then speeds are 0.61 of what they were at first",
        {"shift": 0.5, **FIGURES},
    ),
    (
        events.AblationStarted("precision", 1, REFERENCE),
        "without precision, round 1, starts: batch 64",
        {"without": "precision", "round": 1, "settings": "batch 64"},
    ),
    (
        events.AblationEnded(None, 1, BF16, REFUSED),
        "the plan again, round 1: out of memory at 640 MiB: refused",
        {"without": None, "round": 1, "settings": "batch 64, bf16", **OUT},
    ),
    (events.Stopped("enough"), "no more trials: enough; the best are measured again", {"words": "enough"}),
    (events.Stopped(events.INTERRUPTED), "no more trials: interrupted", {"words": "interrupted"}),
    (
        events.SecondsKnown({"reading": {"beside": 16.0}, "trials": {"load": 7.0, "timed": 120.0}}),
        "spent 2 min 23 s: reading 16 s, trials 2 min 07 s",
        {"spent": {"reading": {"beside": 16.0}, "trials": {"load": 7.0, "timed": 120.0}}},
    ),
]


def told(*happened: Event) -> Progress:
    """A display to which this has happened, at second 0."""
    progress = Progress(OPTIONS, clock=lambda: 0.0)
    for event in (events.TaskRead(FACTS), REFERENCE_ENDED, *happened):
        progress.observe(event)
    return progress


@pytest.mark.parametrize(("event", "words", "row"), SAID, ids=lambda each: getattr(each, "kind", ""))
def test_each_event_says_itself_in_a_line_and_a_row(event: Event, words: str, row: dict[str, Any], tmp_path: Path):
    progress = told(event)
    assert line(event, progress) == f"[0 s] {words}"
    path = tmp_path / "events.jsonl"
    file = EventFile(path, OPTIONS)
    for each in (events.TaskRead(FACTS), event):
        file.observe(each)
    written = json.loads(path.read_text().splitlines()[-1])
    assert written.pop("event") == event.kind
    assert written.pop("time") > 0
    assert written == row
    assert [*written] == [*row], "in this order"


def test_every_kind_of_event_is_held_here_by_its_name():
    """Programs go by these names: a class may be called otherwise, and its kind may not."""
    kinds = {
        getattr(each, "kind", "") for _, each in inspect.getmembers(events, inspect.isclass) if issubclass(each, Event)
    }
    assert kinds - {""} == {event.kind for event, _, _ in SAID}
    assert {event.kind for event, _, _ in SAID} == {
        "inspected",
        "warned",
        "trial_started",
        "trial_ended",
        "search_started",
        "budget_known",
        "quality_known",
        "prediction_started",
        "prediction_ended",
        "cuts_started",
        "cuts_ended",
        "finalist_ended",
        "anchor_started",
        "anchor_ended",
        "ablation_started",
        "ablation_ended",
        "stopped",
        "seconds_known",
    }


def test_the_services_page_listens_to_every_kind():
    """A browser hands on an event that has a name only to who listens to that name."""
    page = (Path(service.__file__).parent / "web" / "static" / "page.js").read_text(encoding="utf-8")
    listened = set(re.findall(r'"(\w+)"', page.partition("const KINDS = [")[2].partition("]")[0]))
    assert {event.kind for event, _, _ in SAID} <= listened


@dataclass(frozen=True)
class RestStarted(RunStarted, kind="rest_started"):
    settings: Settings

    @property
    def label(self) -> str:
        return "a rest"

    def words(self, known: events.Known) -> str:
        return "a rest starts"


@dataclass(frozen=True)
class RestEnded(RunEnded, kind="rest_ended"):
    settings: Settings
    outcome: Outcome

    @property
    def label(self) -> str:
        return "a rest"

    def words(self, known: events.Known) -> str:
        return "a rest ends"

    def row(self, known: events.Known) -> dict[str, Any]:
        return {"words": "rested"}


def test_a_new_event_is_one_class(tmp_path: Path):
    """Its line, its row, what runs and the panel's row of what ran come of it alone."""
    started, ended = RestStarted(REFERENCE), RestEnded(REFERENCE, MEASURED)
    assert "a rest, 0 s: batch 64" in shown(told(started))
    after = told(started, ended)
    assert "a rest, 0 s" not in shown(after)
    assert "a rest  " in shown(after)
    assert line(ended, after) == "[0 s] a rest ends"
    EventFile(tmp_path / "events.jsonl", OPTIONS).observe(ended)
    written = json.loads((tmp_path / "events.jsonl").read_text())
    assert (written["event"], written["words"]) == ("rest_ended", "rested")


def shown(progress: Progress) -> str:
    return printed(draw(progress, 10), 120)
