"""What a plan states comes from fresh interpreters, and from another round than the one that picked it."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest
from search_tables import (
    BF16,
    BOTH,
    MIB,
    REFERENCE,
    SMALL,
    TCMALLOC,
    configurations,
    every,
    facts,
    is_again,
    measurement,
    options,
    peak,
    row,
    run_search,
    small_search,
    speed,
)

from autotune.errors import Interrupted, NothingFits
from autotune.plan import Budget, Speed
from autotune.searches.events import FinalistEnded, Stopped, Warned
from autotune.searches.winner.evidence import combine
from autotune.techniques import Settings
from autotune.workers import Crashed, Measured, OutOfMemory, TimedOut
from autotune.workers.table import TableExecutor

pytestmark = pytest.mark.usefixtures("in_memory")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("space.yaml").write_text(SMALL)


def test_rivals_are_compared_once_then_winner_and_reference_take_turns():
    """Both settings together do 166 samples/s in their trial, bf16 158, tcmalloc 102: no rival of the others."""
    run = small_search(every)
    assert run.again == [BOTH, BF16] + [BOTH, REFERENCE] * 2
    assert run.fresh == [BOTH, REFERENCE] * 2


def test_the_rounds_are_told_as_they_end():
    ended = small_search(every).seen(FinalistEnded)
    assert [event.round for event in ended] == [0, 0, 1, 1, 2, 2]


def test_losses_are_compared_in_trials_and_in_no_fresh_interpreter():
    """A job compares none, and what its process is charged should be what a job is charged."""
    requests = [request for request in small_search().executor.requests if request.kind == "measure"]
    compared = {True: set(), False: set()}
    for request in requests:
        if request.fresh or not is_again(request):
            compared[request.fresh].add(request.options.parity_batch is not None)
    assert compared == {True: {False}, False: {True}}


@pytest.mark.parametrize("ended_before", [0, 1, 2])
def test_without_the_time_to_compare_nothing_slower_than_the_job_as_it_stands_is_the_plan(ended_before):
    """The user interrupts, before the finalists or once one or two have run."""
    stop = threading.Event()
    rows = [row(settings, samples_per_s=(0.99 * speed(REFERENCE),)) for settings in (BOTH, BF16, TCMALLOC)]

    class Interrupts(TableExecutor):
        def _answer(self, request):
            if len(self.requests) >= 5 + ended_before:
                stop.set()
            return super()._answer(request)

    executor = Interrupts(facts(), [row(REFERENCE), *rows])
    run = run_search(options(), executor=executor, stop=stop)
    assert run.plan.settings == REFERENCE
    assert run.plan.search.stopped == "interrupted"


def test_a_reference_that_alone_fits_takes_turns_with_nobody():
    rows = [row(settings, peak_bytes=(10**12,)) for settings in (BOTH, BF16, TCMALLOC)]
    run = run_search(options(budget=64 * 2**30), rows=rows)
    assert (run.fresh, run.plan.settings) == ([REFERENCE] * 2, REFERENCE)


@pytest.mark.parametrize(("lucky", "winner"), [(155.5, BOTH), (157.0, BF16)])
def test_the_winner_is_picked_by_its_trial_and_the_first_round_together(lucky: float, winner: Settings):
    """bf16 was lucky in the search, and holds 144 when it is measured again; both settings together hold 150. The
    geometric means are 149.6 and 150, or 150.4 and 150."""
    rows = [
        row(BF16, samples_per_s=(lucky, 144.0, 144.0, 144.0, 144.0), peak_bytes=(MIB,) * 5),
        row(BOTH, samples_per_s=(150.0,), peak_bytes=(MIB,)),
    ]
    assert run_search(every(), rows=rows).plan.settings == winner


def test_the_numbers_that_picked_the_winner_are_not_among_those_reported():
    """In the search 160, in the first round 170, then 120: the plan says 120."""
    rows = [row(BOTH, samples_per_s=(160.0, 170.0, 120.0, 120.0, 120.0), peak_bytes=(MIB,) * 5)]
    assert run_search(options(), rows=rows).plan.measured.samples_per_s.value == 120.0


def test_the_peak_is_the_largest_of_the_repeats_in_whole_mebibytes():
    peaks = (MIB, 2 * MIB, 3 * MIB + 1, MIB)
    rows = [row(BOTH, samples_per_s=(200.0,) * 4, peak_bytes=peaks)]
    assert run_search(options(), rows=rows).plan.measured.peak.process == 4 * MIB


def test_a_winner_that_does_not_hold_the_budget_in_a_repeat_gives_way_to_the_next():
    limit = 700 * MIB
    rows = [row(BOTH, samples_per_s=(200.0,) * 4, peak_bytes=(MIB, MIB, limit, MIB))]
    run = run_search(every(budget=limit), rows=rows)
    assert run.plan.settings == BF16
    assert run.plan.measured.samples_per_s.repeats == 2
    assert any("trial 1 is out: over the budget by 21 MiB" in event.message for event in run.seen(Warned))
    assert any("trial 1 fell when it was measured again" in note for note in run.plan.notes)


def test_what_a_finalist_gains_is_against_the_reference_of_its_own_turns():
    """The fastest falls in its second round; other work then takes half of all speeds. bf16 is measured beside the
    reference at that pace, and not against what it did before."""
    limit, paces = 700 * MIB, [1.0]

    class Drifts(TableExecutor):
        def _answer(self, request):
            outcome = super()._answer(request)
            if not (request.kind == "measure" and request.fresh):
                return outcome
            found = outcome.measurement
            value = found.samples_per_s.value * paces[-1]
            if found.peak.process == limit:
                paces.append(0.5)
            changed = found.model_copy(update={"samples_per_s": Speed(value=value, low=value, high=value)})
            return outcome.model_copy(update={"measurement": changed})

    rows = [row(one) for one in configurations(facts()) if one != BOTH]
    falls = row(BOTH, samples_per_s=(200.0,) * 3, peak_bytes=(MIB, MIB, limit))
    run = run_search(every(budget=limit), executor=Drifts(facts(), [*rows, falls]))
    assert run.fresh == [BOTH, REFERENCE, BOTH] + [BF16, REFERENCE] * 2
    assert run.plan.gain.speed == round(speed(BF16) / speed(REFERENCE), 3)
    assert run.plan.gain.rounds == 2


def test_a_search_that_was_settled_goes_on_where_its_best_does_not_hold():
    """What is fastest by far ends the search; in its second repeat it needs all of the budget."""
    limit = 700 * MIB
    rows = [row(BOTH, samples_per_s=(2000.0,) * 3, peak_bytes=(MIB, MIB, limit))]
    run = run_search(options(budget=limit), rows=rows)
    asked = [
        (request.plan.settings, is_again(request)) for request in run.executor.requests if request.kind == "measure"
    ]
    assert asked.index((BOTH, True)) < asked.index((BF16, False)) < asked.index((BF16, True))
    first, last = (event.reason for event in run.seen(Stopped))
    assert first.startswith("stopped after 2 trials: ")
    assert last == run.plan.search.stopped
    assert (run.plan.settings, run.plan.search.trials) == (BF16, len(run.measured))
    assert [note for note in run.plan.notes if "fell" in note] == [
        "trial 1 fell when it was measured again: over the budget by 21 MiB, margin included"
    ]


def test_a_search_whose_trials_are_used_up_does_not():
    rows = [row(BOTH, samples_per_s=(200.0,) * 3, peak_bytes=(MIB, MIB, 700 * MIB))]
    with pytest.raises(NothingFits, match="none of 2 configurations can be used within 700 MiB"):
        run_search(options(budget=700 * MIB, trials=2), rows=rows)


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_what_the_first_round_showed_counts_where_there_is_no_time_for_more(is_interrupted: bool):
    """The fastest falls in its second repeat, and the user interrupts or the time is over. bf16's trial says 190, and
    it was measured again at 60; tcmalloc's says 186 twice."""
    limit, stop, now = 700 * MIB, threading.Event(), [0.0]

    class Interrupts(TableExecutor):
        def _answer(self, request):
            if request.id.endswith("round-2"):
                stop.set() if is_interrupted else now.append(999.0)
            return super()._answer(request)

    rows = [
        row(BOTH, samples_per_s=(195.0,) * 4, peak_bytes=(MIB, MIB, MIB, limit)),
        row(BF16, samples_per_s=(190.0, 60.0), peak_bytes=(MIB, MIB)),
        row(TCMALLOC, samples_per_s=(186.0,), peak_bytes=(MIB,)),
    ]
    executor = Interrupts(facts(), [row(REFERENCE), *rows])
    options = every(budget=limit, max_time=1000.0)
    assert run_search(options, executor=executor, stop=stop, clock=lambda: now[-1]).plan.settings == TCMALLOC


def test_a_finalist_that_the_end_of_the_time_cuts_short_is_not_out():
    now = [0.0]

    class Slow(TableExecutor):
        def _answer(self, request):
            if not request.fresh:
                return super()._answer(request)
            now[0] += request.deadline_s
            return TimedOut(deadline_s=request.deadline_s, message="ended")

    executor = Slow(facts(), [row(settings) for settings in configurations(facts())])
    run = run_search(every(max_time=60.0), executor=executor, clock=lambda: now[0])
    assert (run.plan.settings, run.plan.measured.samples_per_s.repeats) == (BOTH, 1)
    assert not any("fell" in note for note in run.plan.notes)


def test_a_finalist_that_fails_in_the_first_round_is_not_the_winner():
    class Fails(TableExecutor):
        def _answer(self, request):
            fails = is_again(request) and request.plan.settings == BOTH
            return Crashed(message="SIGSEGV") if fails else super()._answer(request)

    executor = Fails(facts(), [row(settings) for settings in configurations(facts())])
    assert run_search(options(), executor=executor).plan.settings == BF16


@pytest.mark.parametrize(("num_late", "winner"), [(1, BOTH), (2, BF16)])
def test_a_finalist_that_does_not_end_in_time_is_run_once_more_for_twice_as_long(num_late, winner):
    """Its trial did: it is the machine that has become slow."""
    late = []

    class Late(TableExecutor):
        def _answer(self, request):
            if is_again(request) and request.plan.settings == BOTH and len(late) < num_late:
                late.append(request.deadline_s)
                return TimedOut(deadline_s=request.deadline_s, message="ended")
            return super()._answer(request)

    executor = Late(facts(), [row(settings) for settings in configurations(facts())])
    run = run_search(options(), executor=executor)
    assert run.plan.settings == winner
    assert [one / late[0] for one in late] == [1.0, 2.0][:num_late]
    assert sum("It runs once more, for up to" in event.message for event in run.seen(Warned)) == 1


def test_when_every_finalist_falls_the_reference_is_the_plan():
    class OnlyTheReference(TableExecutor):
        def _answer(self, request):
            fails = is_again(request) and request.plan.settings != REFERENCE
            return Crashed(message="SIGSEGV") if fails else super()._answer(request)

    executor = OnlyTheReference(facts(), [row(settings) for settings in configurations(facts())])
    plan = run_search(options(), executor=executor).plan
    assert plan.settings == REFERENCE
    assert plan.gain.speed == 1.0


def test_when_everything_falls_nothing_fits_and_the_nearest_miss_is_one_whose_peak_is_known():
    """Finalists were ended at 701 MiB and need more than that; fp32 under tcmalloc ran to its end, at 714 MiB."""
    limit = 700 * MIB

    class Grows(TableExecutor):
        def _answer(self, request):
            if not is_again(request):
                return super()._answer(request)
            return OutOfMemory(peak_bytes=limit + MIB, message="the watchdog")

    executor = Grows(facts(), [row(settings) for settings in configurations(facts())])
    with pytest.raises(NothingFits, match=r"Nearest miss: 714 MiB with(.|\n)*--budget 736MiB would admit it"):
        run_search(every(budget=limit), executor=executor)
    assert not Path("plan.yaml").exists()


def test_a_reference_that_fell_is_not_chosen():
    """It fits, and is killed when it is measured again: the plan is of the next, slower as that may be."""

    class Killed(TableExecutor):
        def _answer(self, request):
            reference = request.kind == "measure" and request.plan.settings == REFERENCE
            return Crashed(message="SIGKILL") if request.fresh and reference else super()._answer(request)

    executor = Killed(facts(), [row(settings) for settings in configurations(facts())])
    run = run_search(options(), executor=executor)
    assert run.plan.settings != REFERENCE


def test_a_reference_that_never_ran_again_is_not_chosen_over_what_turned_out_slower():
    """Its trial says 97; both settings together hold 50 in fresh interpreters, where it is killed each time."""

    class Killed(TableExecutor):
        def _answer(self, request):
            reference = request.fresh and request.plan.settings == REFERENCE
            return Crashed(message="SIGKILL") if reference else super()._answer(request)

    slow = row(BOTH, samples_per_s=(200.0, 200.0, 50.0, 50.0, 50.0), peak_bytes=(MIB,) * 5)
    known = [row(settings) for settings in configurations(facts()) if settings != BOTH]
    plan = run_search(every(), executor=Killed(facts(), [*known, slow])).plan
    assert (plan.settings, plan.measured.samples_per_s.value) == (BOTH, 50.0)


def test_an_interruption_while_the_only_one_that_fits_falls_is_no_proof_that_nothing_fits():
    limit, stop = 700 * MIB, threading.Event()

    class Interrupts(TableExecutor):
        def _answer(self, request):
            if request.fresh:
                stop.set()
            return super()._answer(request)

    rows = [row(BOTH, samples_per_s=(2000.0,) * 2, peak_bytes=(MIB, limit))]
    executor = Interrupts(facts(), [*(row(one) for one in configurations(facts()) if one != BOTH), *rows])
    with pytest.raises(Interrupted, match="Go on with --resume"):
        run_search(options(budget=limit), executor=executor, stop=stop)


def test_a_plan_is_never_slower_than_a_reference_that_fits():
    """Both settings together are fast until the reporting rounds, where they drop to 50 against the reference's 97."""
    rows = [row(BOTH, samples_per_s=(200.0,) + (50.0,) * 6, peak_bytes=(MIB,) * 7)]
    plan = run_search(every(), rows=rows).plan
    assert plan.settings == REFERENCE
    assert plan.measured.samples_per_s.repeats == 2  # both rounds say that it is slower
    assert plan.gain.speed == 1.0


def test_a_slower_plan_stands_where_the_reference_is_over_the_budget():
    rows = [row(s, samples_per_s=(10.0,)) for s in (BF16, TCMALLOC, BOTH)]
    assert run_search(options(budget=600 * MIB), rows=rows).plan.gain.speed < 1


def test_a_reference_that_ran_out_of_memory_is_not_run_again():
    rows = [row(REFERENCE, outcome=OutOfMemory(peak_bytes=10**9, message="no"))]
    assert REFERENCE not in run_search(options(), rows=rows).fresh


def test_a_reference_over_the_budget_takes_turns_without_enforcement():
    run = run_search(options(budget=600 * MIB))
    fresh = [request for request in run.executor.requests if request.fresh]
    assert [r.options.enforce for r in fresh if r.plan.settings == REFERENCE] == [False] * 2
    assert all(r.options.enforce for r in fresh if r.plan.settings != REFERENCE)
    assert all(r.options.plain_loop == (r.plan.settings == REFERENCE) for r in fresh)


def test_a_gain_that_is_not_proven_is_noted_after_six_rounds():
    """Of the pairs, some say 1.04 and others 0.99."""
    rows = [row(s, samples_per_s=(104.0, 99.0), peak_bytes=(MIB, MIB)) for s in (BF16, TCMALLOC, BOTH)]
    run = run_search(options(), rows=[*rows, row(REFERENCE, samples_per_s=(100.0,))])
    assert len(run.fresh) == 12
    assert any(note.startswith("no gain in speed is proven: it is 0.9") for note in run.plan.notes)
    assert not run.plan.gain.is_proven


def test_repeats_that_lie_far_apart_are_noted():
    """Of the winner, about 150 and 300 in turn in the reported rounds: 95 % is more than a quarter to either side."""
    rows = [row(BOTH, samples_per_s=(200.0, 150.0, 300.0, 155.0, 290.0, 151.0, 305.0), peak_bytes=(peak(BOTH),) * 7)]
    notes = run_search(options(), rows=rows).plan.notes
    assert any(note.startswith("speeds vary by ±") for note in notes)
    assert not any(note.startswith("speeds vary by ±") for note in small_search().plan.notes)


def test_pieces_of_a_compiled_model_are_noted():
    """Three places by name, each once."""
    places = tuple(f"model.py, line {line}: print(x) (why)" for line in range(1, 6))
    found = measurement(300.0, process=peak(BOTH)).model_copy(update={"graph_breaks": places})
    notes = run_search(options(), rows=[row(BOTH, outcome=Measured(measurement=found, seconds=1.0))]).plan.notes
    (said,) = [note for note in notes if "in pieces" in note]
    assert said.endswith(f"torch cannot go on at {'; '.join(places[:3])}; and at 2 more")
    assert not any("in pieces" in note for note in small_search().plan.notes)


def test_waiting_for_data_is_noted_from_a_tenth_of_the_time_on():
    for share, is_said in ((0.09, False), (0.4, True)):
        rows = [row(settings, loader_wait=share) for settings in (BF16, TCMALLOC, BOTH)]
        notes = run_search(options(), rows=rows).plan.notes
        assert any("of the time is spent waiting for data" in note for note in notes) == is_said


@pytest.mark.parametrize(
    ("reason", "ends"),
    [
        (None, "would show"),
        (
            "the script was not seen to begin a next epoch",
            "is not cached: the script was not seen to begin a next epoch",
        ),
    ],
)
def test_why_no_epoch_is_cached_is_said_where_data_are_waited_for(reason, ends):
    rows = [row(settings, loader_wait=0.4) for settings in (BF16, TCMALLOC, BOTH)]
    notes = run_search(options(), facts(epochs_differ=reason), rows).plan.notes
    (note,) = [note for note in notes if "waiting for data" in note]
    assert note.endswith(ends)


def test_the_gain_is_the_ratio_of_the_repeats():
    gain = small_search().plan.gain
    assert gain.speed == round(speed(BOTH) / speed(REFERENCE), 3)
    assert gain.memory == round(math.ceil(peak(BOTH) / MIB) / math.ceil(peak(REFERENCE) / MIB), 3)


def test_the_interval_is_students_over_three_repeats():
    """99, 100, 101: mean 100, deviation 1, so 4.303 / sqrt(3) = 2.484 on either side."""
    found = combine([measurement(value) for value in (99.0, 100.0, 101.0)], Budget()).samples_per_s
    assert (found.value, found.repeats) == (100.0, 3)
    assert (found.low, found.high) == (97.516, 102.48)


def test_an_interval_within_the_repeats_that_is_wider_stands():
    found = combine([measurement(100.0, half=5.0) for _ in range(3)], Budget()).samples_per_s
    assert (found.low, found.high) == (95.0, 105.0)


def test_one_repeat_over_the_budget_means_that_it_does_not_fit():
    repeats = [measurement(1.0, process=MIB), measurement(1.0, process=100 * MIB)]
    assert combine(repeats, Budget(limit=103 * MIB)).fits
    assert not combine(repeats, Budget(limit=102 * MIB)).fits
