"""What rounds in turn say: pairs, medians where one is off, and when they are sure."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from search_tables import (
    BOTH,
    MIB,
    REFERENCE,
    configurations,
    every,
    facts,
    measurement,
    options,
    row,
    run_search,
)

from autotune.errors import OutOfTime
from autotune.plan import Budget, PhasePeak, Speed
from autotune.searches.winner.evidence import Pair, are_sure, combine, gain, interval, undisturbed
from autotune.workers import Measured, TrialRequest
from autotune.workers.table import TableExecutor

pytestmark = pytest.mark.usefixtures("in_memory", "small_space")


def pairs(*speeds: tuple[float, float]) -> list[Pair]:
    return [Pair(measurement(winner), measurement(reference)) for winner, reference in speeds]


def gain_of(rounds: list[Pair]):
    evidence = [combine([getattr(pair, name) for pair in rounds], Budget()) for name in ("winner", "reference")]
    return gain(*evidence, rounds, None)


def test_a_machine_that_slows_down_from_round_to_round_hides_no_gain():
    """The first round ran at 200 and 100, the third at 100 and 50: each pair says 2."""
    found = gain_of(pairs((200, 100), (160, 80), (100, 50)))
    assert (found.speed, found.low, found.high, found.rounds) == (2.0, 2.0, 2.0, 3)
    assert found.is_proven


def test_the_interval_is_students_over_the_logarithms_of_the_pairs():
    """Ratios e^0.1, e^0.2, e^0.3: mean 0.2, deviation 0.1, so 4.303 * 0.1 / sqrt(3) = 0.248 on either side."""
    found = gain_of(pairs(*((100 * math.exp(x), 100) for x in (0.1, 0.2, 0.3))))
    assert found.speed == 1.221
    assert (found.low, found.high) == (round(math.exp(0.2 - 0.24841), 3), round(math.exp(0.2 + 0.24841), 3))
    assert not found.is_proven


def test_one_value_that_is_off_moves_neither_center_nor_interval():
    """100, 101, 102, 101 and one of 60: the median is 101; the others' deviation is 0.816, so 3.182 * 0.816 / 2."""
    found = interval([100.0, 101.0, 102.0, 101.0, 60.0], scale=101.0)
    assert found.value == 101.0
    assert found.high - found.value == pytest.approx(3.1824 * 0.81650 / 2, rel=1e-4)


def test_two_torn_rounds_have_an_interval_that_can_be_written():
    found = gain_of(pairs((400, 100), (100, 400)))
    assert found.low < 1 < found.high < 1e9


def test_rounds_that_agree_on_a_gain_are_sure_after_two():
    assert are_sure(pairs((200, 100), (202, 101)), Budget())
    assert not are_sure(pairs((200, 100)), Budget())


def test_rounds_are_not_sure_while_speeds_differ_or_no_gain_is_proven():
    assert not are_sure(pairs((200, 100), (220, 110)), Budget())
    assert not are_sure(pairs((100, 100), (101, 100)), Budget())
    assert not are_sure(pairs((100, 100), (101, 100), (99, 100)), Budget())


def test_rounds_that_agree_on_no_gain_are_sure_too():
    """Ratios of 1 and 1.001: at 95 % no more than 1.007, which is below 1.02."""
    assert are_sure(pairs((100, 100), (100.1, 100)), Budget())


def test_two_runs_four_percent_apart_are_known_and_five_are_not():
    """The standard error of two values is half their distance."""
    assert are_sure(pairs((208, 104), (200, 100)), Budget())
    assert not are_sure(pairs((210, 105), (200, 100)), Budget())


def test_rounds_are_not_sure_where_the_next_peak_may_be_over_the_budget():
    """Peaks of 90 and 94 MiB: two more such steps are 102 MiB."""
    rounds = [Pair(measurement(100, process=size * MIB), measurement(50)) for size in (90, 94)]
    assert are_sure(rounds, Budget(limit=102 * MIB))
    assert not are_sure(rounds, Budget(limit=101 * MIB))


def test_disturbed_rounds_do_not_count_where_two_others_do():
    calm, torn = pairs((200, 100))[0], Pair(measurement(20, disturbed=0.4), measurement(100))
    assert undisturbed([calm, torn, calm]) == [calm, calm]
    assert undisturbed([calm, torn]) == [calm, torn]
    assert (are_sure([calm, calm, torn], Budget()), are_sure([calm, torn], Budget())) == (True, False)


def test_a_machine_that_is_never_calm_is_taken_as_it_is_from_the_third_round_on():
    busy = [Pair(measurement(200, disturbed=0.09), measurement(100))] * 3
    assert not are_sure(busy[:2], Budget())
    assert are_sure(busy, Budget())


def test_a_disturbed_run_counts_with_its_peak_alone():
    found = combine([measurement(100), measurement(100)], Budget(), [measurement(5, disturbed=0.9, process=7 * MIB)])
    assert (found.samples_per_s.value, found.samples_per_s.repeats, found.peak.process) == (100.0, 2, 7 * MIB)


def test_what_repeats_differ_by_is_kept_and_granted_twice_where_it_is_more_than_the_margin():
    def peak(*sizes):
        return combine([measurement(100, process=size * MIB) for size in sizes], Budget()).peak

    assert (peak(90).spread, peak(90, 90).spread, peak(90, 100, 98).spread) == (None, None, 10 * MIB)
    assert peak(90, 100).next_bytes(0.03) == 120 * MIB
    assert peak(99, 100).next_bytes(0.03) == 103 * MIB


def test_repeats_of_other_phases_are_not_held_against_each_other():
    """One measured saving, which took 40 MiB more; the two that trained alone differ by nothing."""
    trained, saved = measurement(100, process=60 * MIB), measurement(100, process=60 * MIB)
    saved = saved.model_copy(update={"peak": saved.peak.with_phases({"saving": PhasePeak(process=100 * MIB)})})
    found = combine([trained, saved, trained], Budget()).peak
    assert (found.process, found.spread) == (100 * MIB, None)


class Again(TableExecutor):
    """Answers the rounds of the winner in fresh interpreters from a list."""

    def __init__(self, speeds: list[float], disturbed: list[float]) -> None:
        super().__init__(facts(), [row(settings) for settings in configurations(facts())])
        self.left = list(zip(speeds, disturbed, strict=True))

    def _answer(self, request: TrialRequest):
        outcome = super()._answer(request)
        if request.fresh and request.plan.settings == BOTH and isinstance(outcome, Measured):
            value, disturbed = self.left.pop(0)
            speed = Speed(value=value, low=value, high=value)
            changed = outcome.measurement.model_copy(update={"samples_per_s": speed, "disturbed": disturbed})
            return outcome.model_copy(update={"measurement": changed})
        return outcome


@pytest.mark.medium
def test_a_round_that_other_work_disturbed_is_measured_again():
    run = run_search(options(), executor=Again([200.0, 50.0, 200.0, 1.0], [0.0, 0.5, 0.0, 0.0]))
    assert run.fresh == [BOTH, REFERENCE] * 3
    assert (run.plan.measured.samples_per_s.value, run.plan.measured.samples_per_s.repeats) == (200.0, 2)
    assert run.plan.gain.rounds == run.plan.reference.samples_per_s.repeats == 2
    assert not any("not sure" in note for note in run.plan.notes)


def test_rounds_go_on_to_six_and_then_say_why_they_are_not_sure():
    run = run_search(options(), executor=Again([200.0, 50.0] * 3, [0.5] * 6))
    assert run.fresh == [BOTH, REFERENCE] * 6
    assert (
        "the figures are not sure after 6 fresh interpreters: in 6 of them other work took up to 50% of the time"
        in (run.plan.notes)
    )


def test_a_machine_that_is_never_calm_makes_sure_figures_with_a_note():
    run = run_search(options(), executor=Again([200.0] * 3, [0.1, 0.3, 0.2]))
    assert run.fresh == [BOTH, REFERENCE] * 3
    assert "other work took up to 30% of the time: the speeds are what it left" in run.plan.notes


def test_a_machine_that_is_calm_in_all_rounds_but_one_is_given_no_note():
    notes = run_search(options(), executor=Again([200.0, 50.0, 200.0], [0.0, 0.3, 0.0])).plan.notes
    assert not any("other work" in note for note in notes)


def test_a_leader_without_rivals_is_not_compared():
    """It is twice as fast as the next, whose trials are sure to 1 %."""
    rows = [row(BOTH, samples_per_s=(1000.0,))]
    run = run_search(every(), rows=rows)
    assert run.again == [BOTH, REFERENCE] * 2


def test_a_trial_that_other_work_spoiled_runs_once_more_and_the_calmer_counts():
    """A paused machine: 4 samples per second with 93 % of the time gone, then 200."""
    rows = [row(BOTH, samples_per_s=(4.0, 200.0, 200.0, 200.0), peak_bytes=(MIB,) * 4, disturbed=(0.93, 0.0, 0.0, 0.0))]
    run = run_search(every(), rows=rows)
    assert run.measured.count(BOTH) == 2
    assert run.plan.settings == BOTH
    assert len([r for r in run.measured if r != BOTH]) + 1 == run.plan.search.trials


def test_a_search_without_time_for_any_trial_writes_no_plan_and_says_what_it_needs():
    now = [0.0]

    class Slow(TableExecutor):
        def _answer(self, request: TrialRequest):
            now[0] += 30.0
            return super()._answer(request)

    executor = Slow(facts(), [row(settings) for settings in configurations(facts())])
    with pytest.raises(
        OutOfTime, match=r"--max-time 90s left no time .* One trial needs about --max-time \d+s"
    ) as caught:
        run_search(options(max_time=90.0), executor=executor, clock=lambda: now[0])
    assert caught.value.exit_code == 3
    assert not Path("plan.yaml").exists()


def test_what_it_says_it_needs_is_enough():
    """The same search with the time that was named tries something."""
    now = [0.0]

    class Slow(TableExecutor):
        def _answer(self, request: TrialRequest):
            outcome = super()._answer(request)
            now[0] += min(30.0, request.deadline_s)  # what takes longer is ended
            return outcome

    def run(max_time_s: float):
        now[0] = 0.0
        executor = Slow(facts(), [row(settings) for settings in configurations(facts())])
        return run_search(options(max_time=max_time_s), executor=executor, clock=lambda: now[0])

    with pytest.raises(OutOfTime) as caught:
        run(90.0)
    named = float(str(caught.value).partition("about --max-time ")[2].partition("s,")[0])
    assert len(run(named).measured) > 1
