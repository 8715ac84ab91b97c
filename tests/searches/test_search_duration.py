"""How long a search likely takes: by hand, from counts and costs."""

from __future__ import annotations

from pathlib import Path

import pytest
from search_tables import REFERENCE, SPACE_YAML, configurations, facts, row, run_search, speed

from autotune.report.displays.progress import Progress
from autotune.searches.events import TrialEnded
from autotune.searches.options import SearchOptions
from autotune.searches.predicted.duration import Costs, Runs, expected, likely_s, likely_trials
from autotune.techniques import Facts
from autotune.workers import CompareRequest, InspectRequest, Outcome, PredictRequest, TrialRequest
from autotune.workers.table import TableExecutor

COSTS = Costs(trial_s=10.0, again_s=6.0, fresh_s=8.0, round_s=30.0)


def test_runs_take_what_their_like_have_taken():
    assert likely_s(Runs(trials=8, compared=3, fresh=6), COSTS) == 8 * 10 + 3 * 6 + 6 * 8


def test_rounds_by_turns_take_the_place_of_fresh_runs():
    assert likely_s(Runs(trials=8, compared=3, rounds=2), COSTS) == 8 * 10 + 3 * 6 + 2 * 30


def test_trials_share_the_devices_and_finalists_do_not():
    assert likely_s(Runs(trials=8, compared=3, fresh=6), COSTS, num_slots=4) == 2 * 10 + 3 * 6 + 6 * 8


@pytest.mark.parametrize(
    ("most", "sampler", "num_done", "left"),
    [
        (24, "gain", 0, 11),  # it stops by itself
        (24, "gain", 4, 7),
        (24, "gain", 15, 2),  # it has gone on for longer than is usual
        (24, "gain", 24, 0),
        (8, "gain", 0, 8),
        (8, "gain", 7, 1),
        (24, "tpe", 0, 24),  # Optuna's samplers use all
        (24, "tpe", 20, 4),
    ],
)
def test_the_default_sampler_likely_stops_before_it_has_to(most, sampler, num_done, left):
    assert likely_trials(most, sampler, num_done) == left


# A step of 64 samples takes 1.3 * 64 / 83.2 = 1 s, the inspection 5 s: setting up takes (5 - 3) / 2 = 1 s.
KNOWN = facts(step_samples_per_s=83.2)


def test_a_search_that_has_not_begun_is_between_quick_trials_and_slow_ones():
    """Predictions take one to three times as long as the inspection. There are 11 trials, 3 compared, and 2 rounds by
    turns, for which both start in fresh interpreters, in half as long again as one, and take 8 turns. A run takes 1 s
    to be set up, and at the reference's speed 5 steps to warm up and 40 windows of one, 10 more steps where its losses
    are compared; twice as fast, and 10 windows."""
    found = expected(KNOWN, 5.0, SearchOptions(task="model.py", trial_time=60.0), 24)
    slow, quick = 1 + 5 + 40, 1 + 2.5 + 5
    assert found.high_s == pytest.approx(5 + 15 + 11 * (slow + 10) + 3 * slow + 2 * (1.5 * (slow - 40 + 3) + 16))
    assert found.low_s == pytest.approx(5 + 5 + 11 * (quick + 5) + 3 * quick + 2 * (1.5 * (quick - 5 + 3) + 16))


def test_at_most_it_is_all_trials_each_for_all_of_its_time_at_half_the_speed():
    found = expected(KNOWN, 5.0, SearchOptions(task="model.py", trial_time=60.0), 24)
    slowest = 1 + 10 + 60
    assert found.most_s == pytest.approx(
        5 + 15 + 24 * (slowest + 20) + 3 * slowest + 2 * (1.5 * (slowest - 60 + 3) + 16)
    )


def test_a_job_of_several_ranks_takes_no_turns():
    two = expected(KNOWN.model_copy(update={"ranks": 2}), 5.0, SearchOptions(task="model.py", trial_time=60.0), 24)
    slow = 1 + 5 + 40
    assert two.high_s == pytest.approx(5 + 15 + 11 * (slow + 10) + 3 * slow + 6 * (slow + 3))


def test_no_estimate_is_longer_than_the_time_that_was_given():
    found = expected(KNOWN, 5.0, SearchOptions(task="model.py", max_time=50.0), 24)
    assert (found.low_s, found.high_s, found.most_s) == (50.0, 50.0, 50.0)


def test_a_space_of_one_measures_it_and_repeats_it():
    """Nothing is compared, and the reference is the winner: three fresh runs."""
    found = expected(KNOWN, 5.0, SearchOptions(task="model.py", trial_time=2.0, sampler="random"), 1)
    assert found.high_s == pytest.approx(5 + (1 + 5 + 2 + 10) + 3 * (1 + 5 + 2 + 3))


READ_S, PREDICTED_S, LOAD_S, COMPARED_S, IMPORT_S, TIMED_S = 5.0, 6.0, 1.0, 0.5, 4.0, 3.0


class Timed(TableExecutor):
    """Moves a clock by what a small job's processes take."""

    def __init__(self, known: Facts) -> None:
        super().__init__(known, [row(settings) for settings in configurations(known)])
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def _answer(self, request: TrialRequest) -> Outcome:
        began_s, outcome, phases_s = self.now, super()._answer(request), {}
        match request:
            case InspectRequest():
                self.now += READ_S
            case PredictRequest():
                self.now += PREDICTED_S
            case CompareRequest():  # both sides were asked meanwhile
                self.now += 2 * (len(outcome.turns) * request.turn_s - TIMED_S)
            case _:
                settings = request.plan.settings
                phases_s = {"parity": COMPARED_S * (request.options.parity_batch is not None), "timed": TIMED_S}
                rest_s = LOAD_S * speed(REFERENCE) / speed(settings) + IMPORT_S * request.fresh
                self.now += sum(phases_s.values()) + rest_s
        found = {"seconds": self.now - began_s}
        if outcome.kind == "measured":
            found["measurement"] = outcome.measurement.model_copy(update={"phases_s": phases_s})
        return outcome.model_copy(update=found)


@pytest.mark.usefixtures("in_memory")
@pytest.mark.parametrize("host_memory_bytes", [2**21, 2**40], ids=["in turn", "by turns"])
def test_what_is_said_after_the_reference_is_kept_to(host_memory_bytes: int, tmp_path: Path, monkeypatch):
    """Within a factor of 1.5."""
    monkeypatch.chdir(tmp_path)
    Path("space.yaml").write_text(SPACE_YAML)
    known = facts(host_memory_bytes=host_memory_bytes)
    executor = Timed(known)
    asked = SearchOptions(task="model.py", space="space.yaml", trial_time=TIMED_S)
    progress, said = Progress(asked, executor.clock), []

    def observe(event) -> None:
        progress.observe(event)
        if isinstance(event, TrialEnded) and event.number == 0:
            said.append((executor.now, progress.left_s))

    run_search(asked, known, executor=executor, clock=executor.clock, observe=observe)
    ((at_s, left_s),) = said
    took_s = executor.now - at_s
    assert took_s / 1.5 < left_s < took_s * 1.5
