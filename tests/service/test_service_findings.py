"""What lists and the page begin with: what a plan comes to, in words, and how far each phase of a search is."""

from __future__ import annotations

import pytest
from filled_service import PLAN

from autotune.commands.service.searches import row
from autotune.plan import Gain, Plan
from autotune.service.findings import Summary, read_documents, result_of
from autotune.techniques import Settings

GAIN = "1.94x the reference's speed (95 %: 1.90x to 1.98x)"
PEAK = "peak 7.5 GiB of 8 GiB (94%)"
OVER = "the job as it stands takes 9.25 GiB, over the budget"
UNPROVEN = Gain(speed=1.04, low=0.95, high=1.2, rounds=2, memory=0.81, unproven="the interval has 1.00x in it")
UNKNOWN = Gain(speed=None, memory=None, reason="the reference ran out of memory")


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (PLAN.gain, f"{GAIN}; {PEAK}; {OVER}"),
        (UNPROVEN, f"1.04x the reference's speed (95 %: 0.95x to 1.20x, not proven); {PEAK}; {OVER}"),
        (Gain(speed=1.5, memory=0.5), f"1.50x the reference's speed (not proven); {PEAK}; {OVER}"),
        (UNKNOWN, f"41.2 samples/s, no gain is known; {PEAK}; {OVER}"),
    ],
)
def test_a_plan_comes_to_its_gain_with_the_interval_and_its_peak_against_the_budget(gain, words):
    assert result_of(PLAN.model_copy(update={"gain": gain}))["words"] == words


def test_a_budget_that_is_a_share_is_said_in_bytes():
    budget = PLAN.budget.model_copy(update={"of_reference": 0.9})
    assert PEAK in result_of(PLAN.model_copy(update={"budget": budget}))["words"]


def test_a_plan_without_evidence_says_so():
    assert result_of(Plan(settings=Settings()))["words"] == "settings without evidence"


def test_why_nothing_is_proven_goes_with_it(tmp_path):
    """From a plan's file, as a driver leaves it."""
    (tmp_path / "plan.yaml").write_text(PLAN.model_copy(update={"gain": UNPROVEN}).to_yaml())
    result = read_documents(tmp_path / "plan.yaml").result
    assert (result["is_proven"], result["why"]) == (False, "the interval has 1.00x in it")
    assert result["reference"] == {"samples_per_s": 21.2, "peak_bytes": 9.25 * 2**30, "fits": False}


def search(**summary):
    spec = {"budget": "8 GiB"}
    named = {"id": "0" * 16, "name": "model.py", "owner": "ann", "message": "", "retry_at": None, "spec": spec}
    return {**named, "state": "RUNNING", "created_at": 0.0, "ended_at": 72.0, "summary": summary}


def test_status_says_what_the_plan_comes_to_and_not_the_best_trial():
    best = {"words": "84 samples/s ± 121.9 %, 3.1 GiB"}
    found = search(best=best, num_ended=4, num_trials=4, result=result_of(PLAN))
    assert row({**found, "state": "SUCCEEDED"}).endswith(f"model.py  of ann  within 8 GiB  {GAIN}; {PEAK}; {OVER}")


def test_each_phase_has_its_own_progress():
    """Reading, trials, rounds of the finalists, runs without each choice; a driver that goes on begins with none."""
    seen = []
    summary = Summary()
    summary.begin(10.0)
    run = {"number": 2, "round": 0, "num_rounds": None}
    for place, event in enumerate(
        [
            {"event": "inspected", "words": "49 parameters"},
            {"event": "search_started", "study": "s", "num_trials": 3, "resumed": [], "limit_bytes": None},
            {"event": "trial_started", "number": 0, "round": None},
            {"event": "trial_ended", "number": 0, "is_best": True, "words": "100 samples/s, 1 GiB"},
            {"event": "prediction_started", "num_configurations": 96},
            {"event": "prediction_ended", "num_predicted": 90, "num_configurations": 96},
            {"event": "trial_ended", "number": 1, "is_best": False, "words": "crashed"},
            {"event": "stopped", "words": "the time was up"},
            {"event": "trial_started", **run},
            {"event": "finalist_ended", **run, "round": 2, "num_rounds": 5},
            {"event": "trial_started", "number": 0, "round": 3},
            {"event": "ablation_started", "round": 1},
        ]
    ):
        summary.take({**event, "time": 20.0 + place})
        said = row(search(**summary.as_json())).partition("within 8 GiB  ")[2].partition("  best")[0]
        seen += [said] if seen[-1:] != [said] else []
    assert seen == [
        "reading the task: done",
        "0 of 3 trials",
        "1 of 3 trials",
        "predicting memory: 0 of 96",
        "1 of 3 trials",
        "2 of 3 trials",
        "measuring the best again",
        "measuring the best again: to choose among them",
        "measuring the best again: round 2 of 5",
        "measuring the best again: round 3 of 5",
        "what each choice bought",
    ]
    phases = summary.as_json()["phases"]
    assert phases["reading the task"]["since"] == 10.0
    assert phases["trials"] == {"since": 21.0, "done": 2, "of": 3, "words": "2 of 3: the time was up"}
    assert phases["measuring the best again"]["of"] == 5
    again = Summary(summary.as_json())
    again.begin(99.0)
    assert [*again.as_json()["phases"]] == ["reading the task"]
    assert again.as_json()["num_ended"] == 2
