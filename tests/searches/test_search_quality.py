"""The guard: who is kept, who is dropped, and how often it errs."""

from __future__ import annotations

import random

import pytest
from typer.testing import CliRunner

from autotune.cli import app
from autotune.measure.measurement import Quality
from autotune.searches.options import Drop
from autotune.searches.verdict import judge_quality, least_early, lost_share

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
        ((-0.6, -0.4, -0.2), "kept"),  # Student's 4.85 of two degrees of freedom, times 0.2 / sqrt(3): -0.4 - 0.56
        ((-0.7, -0.5, -0.3), "unknown"),  # -0.5 - 0.56 is beyond -1, -0.5 + 0.56 is not
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
    """1.645 times 0.5 is 0.82, and 0.7 is 1.15 of one point."""
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


def judged_in_turn(mean: float, seed: int) -> str:
    """One seed after the other, six at most, with a standard deviation of 0.3 points."""
    draws = random.Random(seed)
    differences: list[float] = []
    judgement = "unknown"
    while judgement == "unknown" and len(differences) < 6:
        differences.append(draws.gauss(mean, 0.3))
        judgement = judge_quality(pairs(*differences), ONE_POINT)
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
