"""What turns say of a gain: each round's mean, and an interval that two rounds are enough for."""

from __future__ import annotations

import math

import pytest
from search_tables import BOTH, MIB, REFERENCE, configurations, facts, measurement, options, row, run_search

from autotune.plan import Budget
from autotune.searches.events import FinalistEnded, TrialStarted
from autotune.searches.winner.evidence import Pair, are_sure, combine, gain, gain_of
from autotune.workers import Failed
from autotune.workers.outcome import Turn
from autotune.workers.table import TableExecutor

pytestmark = pytest.mark.usefixtures("in_memory", "small_space")
ROOMY = facts(host_memory_bytes=2**40)
"""With memory for two processes at once."""


def by_turns(*log_ratios: float, disturbed: tuple[float, ...] = ()) -> Pair:
    """A round in which the reference made 100 samples/s in every turn, and the winner by that logarithm more."""
    taken = disturbed or (0.0,) * len(log_ratios)
    turns = tuple(
        Turn(rates=(100 * math.exp(ratio), 100.0), disturbed=share)
        for ratio, share in zip(log_ratios, taken, strict=True)
    )
    return Pair(measurement(150), measurement(100), turns)


def test_a_round_says_the_mean_of_its_turns():
    assert by_turns(0.1, 0.2, 0.3, 0.4).log_ratio == pytest.approx(0.25)


def test_a_disturbed_turn_does_not_count_where_four_others_do():
    pair = by_turns(0.2, 0.2, 0.2, 0.2, 2.0, disturbed=(0, 0, 0, 0, 0.3))
    assert (len(pair.counted), pair.log_ratio, pair.disturbed) == (4, pytest.approx(0.2), 0.0)


def test_where_most_turns_are_disturbed_all_count_and_say_so():
    pair = by_turns(0.2, 0.2, 0.2, 0.6, disturbed=(0, 0, 0.5, 0.5))
    assert (len(pair.counted), pair.log_ratio, pair.disturbed) == (4, pytest.approx(0.3), 0.25)


def test_two_rounds_are_pooled_with_what_is_known_of_processes():
    """0.40 and 0.42: the scatter is 3 * 0.015**2 + 2 * 0.01**2 = 0.000875 with 3 + 1 degrees of freedom, its root
    0.01479; times 2.776 / sqrt(2) that is 0.02903 on either side of 0.41."""
    found = gain_of([by_turns(*[0.40] * 4), by_turns(*[0.42] * 4)])
    assert (found.value, found.low, found.high) == (
        pytest.approx(0.41),
        pytest.approx(0.41 - 0.02903, abs=1e-5),
        pytest.approx(0.41 + 0.02903, abs=1e-5),
    )


def test_rounds_that_contradict_what_is_known_of_processes_are_judged_by_their_own_scatter():
    """1.26, 1.20, 1.16 and 1.09 times: squares of 0.01113 about a mean of 0.1618 where 0.015**2 * 7.815 = 0.00176 is
    the most at 95 %. The deviation is 0.0609; times 3.182 / sqrt(4) that is 0.0969. Pooled it would be 0.0543."""
    found = gain_of([by_turns(*[ratio] * 4) for ratio in (0.231, 0.182, 0.148, 0.086)])
    assert found.value == pytest.approx(0.16175)
    assert found.high - found.value == pytest.approx(0.0969, abs=1e-4)


def test_turns_that_scatter_widen_the_interval():
    """Within a round the error is 0.1155 / 2 = 0.0577, more than between them: 2.776 * 0.0577 / sqrt(2) = 0.113."""
    rough = by_turns(0.3, 0.5, 0.3, 0.5)
    found = gain_of([rough, rough])
    assert found.high - found.value == pytest.approx(0.1133, abs=1e-4)


def test_one_round_by_turns_proves_no_gain():
    """At least two processes of each are measured before a gain is stated with an interval."""
    pair = by_turns(*[0.4] * 10)
    evidence = [combine([measurement(speed)], Budget(), by_turns=True) for speed in (150, 100)]
    found = gain(*evidence, [pair], None)
    assert (found.speed, found.low, found.rounds) == (1.492, None, None)
    assert not are_sure([pair], Budget())


def test_two_rounds_that_agree_are_sure_and_count_their_turns():
    pairs = [by_turns(*[0.4] * 4), by_turns(*[0.4] * 5)]
    evidence = [combine([measurement(speed)] * 2, Budget(), by_turns=True) for speed in (150, 100)]
    found = gain(*evidence, pairs, None)
    assert (found.rounds, found.turns, found.is_proven) == (2, 9, True)
    assert are_sure(pairs, Budget())


def test_rounds_by_turns_go_on_until_the_gain_is_known_to_3_percent():
    """Of 0.40 and 0.44 the deviation is 0.0192: half the interval is 2.776 * 0.0192 / sqrt(2) = 0.0377, and would be
    2.447 * 0.0192 / sqrt(4) = 0.0235 after four rounds; 3 % is log(1.03) = 0.0296."""
    pairs = [by_turns(*[0.40] * 4), by_turns(*[0.44] * 4)]
    assert gain_of(pairs).low > 0
    assert not are_sure(pairs, Budget())


def test_rounds_by_turns_end_where_four_would_not_make_the_gain_known():
    """Of 0.40 and 0.46 the deviation is 0.0249: half the interval would be 0.0304 after four rounds. The plan says the
    wider one."""
    pairs = [by_turns(*[0.40] * 4), by_turns(*[0.46] * 4)]
    assert are_sure(pairs, Budget())
    assert not are_sure([by_turns(*[-0.03] * 4), by_turns(*[0.06] * 4)], Budget()), "it is not even proven"


def test_the_winner_and_the_reference_take_turns_in_two_pairs_of_processes():
    """The plan says how often, and both sides' runs are told."""
    rows = [row(settings) for settings in configurations(ROOMY)]
    run = run_search(options(), executor=TableExecutor(ROOMY, rows))
    asked = [request for request in run.executor.requests if request.kind == "compare"]
    assert [(request.one.plan.settings, request.other.plan.settings) for request in asked] == [(BOTH, REFERENCE)] * 2
    assert all(request.one.fresh and request.one.options.enforce for request in asked)
    assert not any(request.other.options.enforce for request in asked)
    assert (run.plan.gain.rounds, run.plan.gain.turns) == (2, 8)
    assert [event.by_turns for event in run.seen(TrialStarted) if event.finalist_round] == [True, True]
    ends = [(event.round, event.number == 0) for event in run.seen(FinalistEnded) if event.round]
    assert ends == [(1, False), (1, True), (2, False), (2, True)]


def test_what_a_driver_measured_by_turns_is_not_measured_again():
    """A plan that cannot be written, and then can: the second process has both rounds."""
    rows = [row(settings) for settings in configurations(ROOMY)]
    first = run_search(options(), executor=TableExecutor(ROOMY, rows))
    again = run_search(options(resume=True), executor=TableExecutor(ROOMY, rows))
    assert [request.kind for request in first.executor.requests].count("compare") == 2
    assert [request.kind for request in again.executor.requests].count("compare") == 0
    assert again.plan.gain == first.plan.gain


def test_a_winner_that_fails_as_it_takes_turns_falls_and_the_next_does():
    """It has run in its trial and not in a fresh interpreter."""

    class Fails(TableExecutor):
        def _compared(self, request):
            outcome = super()._compared(request)
            fails = request.one.plan.settings == BOTH
            return outcome.model_copy(update={"one": Failed(message="not here")}) if fails else outcome

    rows = [row(settings) for settings in configurations(ROOMY)]
    run = run_search(options(), executor=Fails(ROOMY, rows))
    assert run.plan.settings != BOTH
    assert run.plan.gain.turns == 8
    assert any("fell when it was measured again: not here" in note for note in run.plan.notes)


@pytest.mark.parametrize("peak", [100 * MIB, 101 * MIB])
def test_both_live_at_once_where_the_host_holds_both_and_a_tenth_more(peak):
    """Twice 100 MiB and a tenth are 220 MiB."""
    own = facts(host_memory_bytes=221 * MIB)
    rows = [row(settings, peak_bytes=(peak,)) for settings in configurations(own)]
    run = run_search(options(), executor=TableExecutor(own, rows))
    assert (run.plan.gain.turns is not None) == (peak == 100 * MIB)
