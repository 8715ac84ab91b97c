"""The guard: who is kept, who is dropped, and how often it errs."""

from __future__ import annotations

import random

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from autotune.cli import app
from autotune.measure.checks.scores import judged_by
from autotune.measure.measurement import Quality
from autotune.searches.options import Drop, SearchedJob, SearchOptions
from autotune.searches.verdict import least_early, lost_share
from autotune.searches.winner.proof import chance, difference_of, judge_quality, look

ONE_POINT = Drop(1.0, is_share=False)


def pairs(*differences: float, error: float = 0.0) -> list[tuple[Quality, Quality]]:
    """Against a reference of 90."""
    return [(Quality(value=90 + one, error=error), Quality(value=90.0)) for one in differences]


@pytest.mark.parametrize("factor", ["0", "-1", "nan", "inf"])
def test_a_learning_rate_of_recovery_is_above_0(factor):
    ended = CliRunner().invoke(app, ["search", "model.py", f"--recovery-lr={factor}"])
    assert ended.exit_code == 2
    assert "must be a number above 0" in ended.output


def test_a_share_is_of_the_references_quality():
    """1 % of -50 (a loss) is 0.5, and 1 is 1."""
    assert Drop(0.01, is_share=True).of(-50.0) == 0.5
    assert ONE_POINT.of(-50.0) == 1.0


@pytest.mark.parametrize(
    ("differences", "judgement"),
    [
        ((0.0, 0.0, 0.0), "kept"),
        ((-1.0, -1.0, -1.0), "kept"),  # no spread, and no more than is allowed
        ((-1.01, -1.01, -1.01), "dropped"),
        ((-0.6, -0.4, -0.2), "kept"),  # Student's 4.30 of two degrees of freedom, times 0.2 / sqrt(3): -0.4 - 0.50
        ((-0.75, -0.55, -0.35), "unknown"),  # -0.55 - 0.50 is beyond -1, -0.55 + 0.50 is not
        ((-2.0, 0.0, 2.0), "unknown"),
        ((-30.0, -31.0, -29.0), "dropped"),
        ((0.0,), "unknown"),
        ((0.0, 0.0), "unknown"),
        ((-2.9,), "unknown"),
        ((-3.1,), "dropped"),  # beyond what is allowed by more than twice that
    ],
)
def test_a_judgement_is_by_students_interval(differences, judgement):
    assert judge_quality(pairs(*differences), ONE_POINT) == judgement


def test_an_evaluations_own_error_is_counted():
    """1.645 times 0.5 is 0.82, and 0.7 is 1.15 of one point; the reference has none here."""
    assert judge_quality(pairs(0.0, 0.0, 0.0, error=0.5), ONE_POINT) == "kept"
    assert judge_quality(pairs(0.0, 0.0, 0.0, error=0.7), ONE_POINT) == "unknown"
    assert judge_quality(pairs(-30.0, error=0.5), ONE_POINT) == "dropped"


def test_what_a_quarter_ruled_out_is_dropped():
    given_up = Quality(value=90.0, is_whole=False)
    assert judge_quality([(given_up, Quality(value=90.0))], ONE_POINT) == "dropped"


def test_an_early_look_leaves_room_for_what_training_still_brings():
    """The reference goes from 80 to 90: 80 - 2 * 10 - 10 * 1 - 3 * 0.5."""
    assert least_early(Quality(value=90.0, early=80.0, error=0.5), ONE_POINT) == 48.5
    assert least_early(Quality(value=90.0), ONE_POINT) is None


def scored(*differences: list[float]) -> list[tuple[Quality, Quality]]:
    """One pair of each list: examples that the reference has right, and what the configuration's scores are above."""
    return [
        (Quality(**judged_by([1 + one for one in row])._asdict()), Quality(**judged_by([1.0] * len(row))._asdict()))
        for row in differences
    ]


def test_scores_are_compared_example_by_example():
    """The second of four examples is lost from each seed: -0.25, with 0.25 / 4 as its variance (0.75 / 3 about the
    mean); nothing of it passes with more seeds."""
    found = difference_of(scored(*[[0, -1, 0, 0]] * 3), allowed=0.1)
    assert (found.value, found.seeds, found.examples, found.passing) == (-0.25, 0.0, 0.0625, 0.0)
    assert found.half() == found.half(6) == pytest.approx(1.645 * 0.25)


def test_what_seeds_do_to_examples_passes_with_more_of_them():
    """Another is lost from each seed: the means of the examples are 0 and three times -1/3, whose variance is 1/36; all
    of it passes. No seed is better than another."""
    found = difference_of(scored([0, -1, 0, 0], [0, 0, -1, 0], [0, 0, 0, -1]), allowed=0.0)
    assert (found.value, found.seeds) == (-0.25, 0.0)
    assert found.examples == pytest.approx(1 / 36 / 4)
    assert found.half(12) == pytest.approx(found.half(3) / 2)


def test_few_examples_of_which_none_differs_prove_nothing():
    """One in a hundred may be lost; of a hundred, 1.645 * sqrt(0.01 / 100) is more than that, of a thousand less. The
    reference has one in fifty wrong, the configuration the same ones."""

    def alike(count: int) -> list[tuple[Quality, Quality]]:
        one = Quality(**judged_by([float(index % 50 > 0) for index in range(count)])._asdict())
        return [(one, one)] * 3

    allowed = Drop(0.01, is_share=False)
    assert judge_quality(alike(100), allowed) == "unknown"
    assert judge_quality(alike(1000), allowed) == "kept"


def test_scores_of_other_examples_are_not_compared_one_by_one():
    """Five and four: their own errors are taken, as if each were of its own examples."""
    one, other = (Quality(**judged_by([1.0, 0.0] * count)._asdict()) for count in (3, 2))
    found = difference_of([(one, other)], allowed=0.1)
    assert found.examples == pytest.approx(one.error**2 + other.error**2)


def test_a_chance_is_that_of_the_last_pair():
    """Nothing lost is kept nearly always, three allowed drops nearly never; what is at the limit, seldom: its interval
    is wider than nothing. A trial, whose seed is none of those of the proof, is a little less sure of either."""
    assert chance(pairs(0.0, 0.1, -0.1), ONE_POINT) > 0.99
    assert chance(pairs(-3.0, -3.2), ONE_POINT) < 0.01
    assert 0.01 < chance(pairs(-0.9), ONE_POINT) < 0.3
    assert 0.5 < chance(pairs(0.0), ONE_POINT, are_counted=False) < chance(pairs(0.0), ONE_POINT)


def test_a_proof_is_by_three_pairs_or_by_six():
    """Four would do, but to look more often is to err more often. What three have proven, a fourth does not undo."""
    three, fourth = (-0.75, -0.55, -0.35), -0.55
    assert judge_quality(pairs(*three, fourth), ONE_POINT) == "kept"
    assert look(pairs(*three, fourth), ONE_POINT) == "unknown"
    assert look(pairs(*three, *[fourth] * 3), ONE_POINT) == "kept"
    assert look(pairs(-0.6, -0.4, -0.2), ONE_POINT) == look(pairs(-0.6, -0.4, -0.2, -5.0), ONE_POINT) == "kept"


def judged_in_turn(mean: float, seed: int) -> str:
    """One seed after the other, six at most, with a standard deviation of 0.3 points."""
    draws = random.Random(seed)
    differences: list[float] = []
    judgement = "unknown"
    while judgement == "unknown" and len(differences) < 6:
        differences.append(draws.gauss(mean, 0.3))
        judgement = look(pairs(*differences), ONE_POINT)
    return judgement


def test_errors_are_rare():
    """Of 200 each: no loss at all is refused at most 10 times, a loss at the very limit is kept at most 20 times, and
    one of two points never."""
    kept = {mean: sum(judged_in_turn(mean, seed) == "kept" for seed in range(200)) for mean in (0.0, -1.0, -2.0)}
    assert kept[0.0] >= 190
    assert kept[-1.0] <= 20
    assert kept[-2.0] == 0


def test_a_loss_is_counted_in_allowed_drops():
    """1.5 points of the one that is allowed, with an error of half a point; given up early, three at least."""
    whole = Quality(value=88.5, error=0.5)
    assert lost_share(whole, Quality(value=90.0), ONE_POINT) == (1.5, 0.5)
    early = Quality(value=75.0, is_whole=False)
    assert lost_share(early, Quality(value=90.0, early=80.0), ONE_POINT) == (5.0, 0.0)
    assert lost_share(early, Quality(value=90.0, early=76.0), ONE_POINT) == (3.0, 0.0)


@pytest.mark.parametrize("drop", ["0%", "-1%", "100.1%", "150%", "nan%", "-0.5", "inf", "a bit"])
def test_a_drop_of_nothing_or_of_more_than_all_is_refused_at_every_door(drop):
    """The command line, jobs and submissions of a service, and Python, which read the same options."""
    ended = CliRunner().invoke(app, ["search", "model.py", f"--max-quality-drop={drop}"])
    assert ended.exit_code == 2
    assert "above 0% and at most 100%" in " ".join(ended.output.replace("│", " ").split())
    with pytest.raises(ValidationError, match="above 0% and at most 100%"):
        SearchedJob(task="model.py", max_quality_drop=drop)


def test_a_drop_that_is_made_in_python_is_as_it_is_read():
    with pytest.raises(ValueError, match=r"above 0% and at most 100%, such as 1%; .* but got 150%"):
        Drop(1.5, is_share=True)
    assert SearchOptions(task="model.py", max_quality_drop="1%").max_quality_drop == Drop(0.01, is_share=True)
    assert SearchOptions(task="model.py", max_quality_drop="100%").max_quality_drop == Drop(1.0, is_share=True)
