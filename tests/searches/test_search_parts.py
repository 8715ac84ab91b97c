"""Configurations that change what the model computes, and those that do not, share a search's time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from search_tables import MIB, configurations, facts, is_again, is_anchor, options, row, run_search, speed

from autotune.estimates import Prediction
from autotune.measure.measurement import Quality
from autotune.search_spaces import load_space
from autotune.searches.options import Drop
from autotune.searches.sampler.configuration_space import ConfigurationSpace
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.optimizers.optimizer_state import OptimizerState
from autotune.workers import Measured, MeasureRequest, Outcome, PredictRequest, TrialRequest
from autotune.workers.table import Row, TableExecutor

pytestmark = pytest.mark.usefixtures("in_memory")
SPACE = """schema: autotune/space@1
precision: [{kind: fp32}, {kind: bf16}]
checkpointing: [{kind: none}, {kind: blocks, every: 1}, {kind: blocks, every: 2}]
allocator: auto
pruning: [{kind: none}, {kind: structured, ratio: 0.25}, {kind: structured, ratio: 0.5}]
"""
POINT = Drop(1.0, is_share=False)
JUDGED = facts(evaluates=True)
REFERENCE = Settings(batch=Batch(micro=64))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("space.yaml").write_text(SPACE)


def rows(quality: float = 90.0) -> Iterator[Row]:
    """Pruned configurations are twice as fast, and lose what is between this quality and the reference's 90 points."""
    for settings in configurations(JUDGED, load_space("space.yaml")):
        changes = settings.affect("function")
        judged = Quality(value=quality if changes else 90.0, early=85.0)
        yield row(settings, samples_per_s=(speed(settings) * (2 if changes else 1),), quality=(judged,))


class Clocked(TableExecutor):
    """Each trial takes so long, whether it changes the function or not; what runs in a fresh interpreter is quick."""

    def __init__(self, same_s: float, changed_s: float) -> None:
        super().__init__(JUDGED, rows())
        self.now, self.took_s = 0.0, {False: same_s, True: changed_s}

    def clock(self) -> float:
        return self.now

    def _answer(self, request: TrialRequest) -> Outcome:
        outcome = super()._answer(request)
        if not isinstance(request, MeasureRequest) or not isinstance(outcome, Measured):
            return outcome
        seconds = 1.0 if request.fresh else self.took_s[request.plan.settings.affect("function")]
        self.now += seconds
        return outcome.model_copy(update={"seconds": seconds})


def changed(run) -> list[bool]:
    """Of each trial after the reference, in order, whether it changes the function."""
    return [settings.affect("function") for settings in run.measured[1:]]


def searched(executor: TableExecutor | None = None, **changes):
    asked = options(max_quality_drop=POINT, recovery_steps=10, **changes)
    return run_search(asked, known=JUDGED, rows=rows(), executor=executor)


@pytest.mark.parametrize("max_time", [90.0, 120.0])
def test_time_does_not_end_a_search_before_something_that_changes_the_model_ran(max_time: float):
    """Trials of the model as it is take 20 s: after the reference there is time for one trial, or two."""
    executor = Clocked(same_s=20.0, changed_s=10.0)
    asked = options(max_quality_drop=POINT, recovery_steps=10, max_time=max_time, trial_time=1.0)
    run = run_search(asked, known=JUDGED, executor=executor, clock=executor.clock)
    assert any(changed(run))


def test_both_go_by_turns():
    """Trials of one duration: neither is ever two ahead, until half of the trials are used up."""
    order = changed(searched(trials=12))
    ahead = [2 * sum(order[: number + 1]) - number - 1 for number in range(9)]
    assert set(ahead) <= {0, 1}


def test_what_takes_longer_has_fewer_trials_and_no_less_time():
    """Three times as long: three of the others go before the next, as long as these have something to try."""
    run = searched(Clocked(same_s=10.0, changed_s=30.0), trials=20)
    order = changed(run)
    assert order[:5] == [True, False, False, False, True]


def test_what_changes_the_model_goes_first_where_nothing_else_is_foreseen_to_fit():
    """All peaks of the model as it is are foreseen over the budget at the job's own batch."""

    def predict(settings: Settings) -> Prediction:
        return Prediction(peak_bytes=(300 if settings.affect("function") else 3000) * MIB)

    asked = options(max_quality_drop=POINT, recovery_steps=10, trials=4, budget=600 * MIB)
    small = (one.model_copy(update={"peak_bytes": (300 * MIB,)}) for one in rows() if one.settings.affect("function"))
    run = run_search(asked, known=JUDGED, rows=[*rows(), *small], predict=predict)
    assert changed(run)[0]


def test_the_model_as_it_is_races_its_like_alone():
    """Pruned ones are twice as fast, and may fall in the end."""
    run = searched(trials=12)
    trials = [r for r in run.executor.requests if r.kind == "measure" and not is_again(r) and not is_anchor(r)]
    own = [request for request in trials[1:] if not request.plan.settings.affect("function")]
    best = max(speed(settings) for settings in configurations(JUDGED, load_space("space.yaml")))
    assert own
    assert all(request.options.to_beat <= best * 1.0001 for request in own)


def test_nothing_is_predicted_twice():
    run = searched(trials=6)
    asked = [
        one.canonical() for r in run.executor.requests if isinstance(r, PredictRequest) for one in r.options.settings
    ]
    assert asked
    assert len(asked) == len(set(asked))


def test_half_of_the_trials_are_of_the_model_as_it_is():
    """So that there is a plan whatever becomes of the quality of others."""
    order = changed(searched(trials=11))
    assert order.count(False) >= 5


# --- tables by hand: models that were cut, trained on and judged by a specialist, from two seeds or three

Found = dict[tuple[float, float], tuple[float, float, float]]
"""By the share of widths that goes and of the rank that stays: speed over the whole model's, points of quality that are
lost, share of the parameters that is left."""
MLP: Found = {
    (0.0, 1.0): (1.0, 0.0, 1.0), (0.25, 1.0): (1.48, 0.12, 0.58), (0.5, 1.0): (2.47, 0.09, 0.27),
    (0.0, 0.25): (1.67, 0.12, 0.49), (0.0, 0.125): (2.17, 1.10, 0.25), (0.25, 0.25): (2.2, 0.2, 0.29),
    (0.25, 0.125): (2.9, 1.3, 0.15), (0.5, 0.25): (3.55, 0.34, 0.13), (0.5, 0.125): (4.21, 1.86, 0.07),
}  # fmt: skip
"""Three layers of 512; a quarter of the widths with low rank was not measured, and lies between."""
VGG: Found = {
    (0.0, 1.0): (1.0, 0.0, 1.0), (0.25, 1.0): (1.57, 0.3, 0.56), (0.5, 1.0): (3.72, 0.6, 0.25),
    (0.75, 1.0): (7.24, 8.75, 0.06),
}  # fmt: skip
BY_HAND = """schema: autotune/space@1
pruning: [{kind: none}, {kind: structured, ratio: 0.25}, {kind: structured, ratio: 0.5}%s]
precision: [{kind: fp32}, {kind: bf16}]
"""
RANKS = "low_rank: [{kind: none}, {kind: svd, rank_ratio: 0.25}, {kind: svd, rank_ratio: 0.125}]\n"


def cut(settings: Settings) -> tuple[float, float]:
    pruning, low_rank = settings.pruning, settings.low_rank
    return (pruning.ratio if pruning.kind != "none" else 0.0), (low_rank.rank_ratio if low_rank.kind != "none" else 1.0)


def search_by_hand(table: Found, space: str, bf16: float, seed: int, trials: int):
    """Speeds are off by 1 % from run to run, a seed's quality by a tenth of a point."""
    Path("space.yaml").write_text(space)
    known, noise = facts(evaluates=True, linear_features=512), random.Random(seed)

    def one(settings: Settings) -> Row:
        faster, lost, _ = table[cut(settings)]
        pace = 20_000 * faster * (bf16 if settings.precision.kind == "bf16" else 1.0)
        qualities = [97.5 - lost + noise.gauss(0, 0.1) for _ in range(12)]
        return row(
            settings,
            samples_per_s=tuple(pace * (1 + noise.gauss(0, 0.01)) for _ in range(8)),
            peak_bytes=(576 * MIB,) * 8,
            quality=tuple(Quality(value=value, early=value - 2) for value in qualities),
        )

    def predict(settings: Settings) -> Prediction:
        left = table[cut(settings)][2]
        return Prediction(peak_bytes=576 * MIB, flops_per_sample=3e6 * left, bytes_per_sample=1e5 * left)

    asked = options(trials=trials, seed=seed, max_quality_drop=Drop(0.01, is_share=True))
    rows = map(one, configurations(known, load_space("space.yaml")))
    return run_search(asked, known=known, rows=rows, predict=predict)


@pytest.mark.medium
@pytest.mark.parametrize(("trials", "seed"), [*itertools.product((8, 24), range(12))])
def test_the_best_by_hand_is_found_from_every_seed(trials: int, seed: int):
    """Within 1 % of the quality, a half of the widths with a quarter of the rank, at 3.55 times the speed. What takes
    away most is not among the first that are tried."""
    run = search_by_hand(MLP, (BY_HAND % "") + RANKS, 1.1, seed, trials)
    assert cut(run.plan.settings) == (0.5, 0.25)
    first = [cut(settings) for settings in run.measured if settings.affect("function")]
    assert (0.5, 0.125) not in first[:2]


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(8))
def test_a_network_of_convolutions_is_pruned_from_every_seed(seed: int):
    """By a half at the most: three quarters lose 9 points."""
    run = search_by_hand(VGG, BY_HAND % ", {kind: structured, ratio: 0.75}", 1.4, seed, 24)
    assert cut(run.plan.settings) == (0.5, 1.0)


def test_a_row_keeps_what_does_not_change_the_function():
    """Of a technique of which some kinds do: fewer bits are the model as it is. Where all do, or none, there is one
    part."""
    kinds = tuple(OptimizerState(kind=kind) for kind in ("default", "8bit", "factored"))
    whole, others, changed = (
        ConfigurationSpace({"optimizer_state": one}, Settings()) for one in (kinds, kinds[:2], kinds[2:])
    )
    same = whole.as_it_is()
    assert same is not None
    assert same.choices == {"optimizer_state": kinds[:2]}
    assert same.distributions == whole.distributions
    assert others.as_it_is() is None
    assert changed.as_it_is() is None
