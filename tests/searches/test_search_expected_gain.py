"""The sampler's contract with plain Optuna: what it proposes, what it learns from, when it stops, how it resumes."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import TrialState

from autotune.estimates import Prediction
from autotune.searches.sampler.configurations import Configuration, Configurations
from autotune.searches.sampler.expected_gain import ExpectedGainSampler
from autotune.searches.store.observations import Observation, observe, withdraw

optuna.logging.set_verbosity(optuna.logging.ERROR)

MIB = 2**20
BATCHES = (1, 2, 4, 8, 16, 32)
DISTRIBUTIONS = {"batch": IntDistribution(0, 5), "precision": CategoricalDistribution(("fp32", "bf16"))}


def peak_bytes(batch: int, precision: str) -> int:
    return round((100 + 20 * BATCHES[batch] * (0.6 if precision == "bf16" else 1)) * MIB)


def log_speed(batch: int, precision: str) -> float:
    return math.log((500 if precision == "bf16" else 300) / (1 + 4 / BATCHES[batch]))


def sampler(predicts: bool = True, **options) -> ExpectedGainSampler:
    rows = [
        Configuration(
            {"batch": batch, "precision": precision},
            BATCHES[batch],
            Prediction(peak_bytes=peak_bytes(batch, precision)) if predicts else None,
        )
        for batch, precision in itertools.product(range(6), ("fp32", "bf16"))
    ]
    return ExpectedGainSampler(Configurations(rows, DISTRIBUTIONS, "batch"), **{"limit_bytes": 300 * MIB, **options})


def objective(trial: optuna.Trial) -> float:
    batch, precision = trial.suggest_int("batch", 0, 5), trial.suggest_categorical("precision", ("fp32", "bf16"))
    peak, speed = peak_bytes(batch, precision), log_speed(batch, precision)
    observe(trial, Observation("measured", speed, 0.005, peak, 10.0))
    trial.set_constraint("memory", math.log(peak * 1.03 / (300 * MIB)))
    return speed


def study(of: ExpectedGainSampler | None = None, **options) -> optuna.Study:
    return optuna.create_study(direction="maximize", sampler=of or sampler(), **options)


def proposed(of: optuna.Study) -> list[dict]:
    return [trial.params for trial in of.trials]


def test_plain_optuna_finds_the_fastest_that_fits_and_stops_by_itself():
    """Within 300 MiB less 3 %: bf16 at 8 (196 MiB) and 4 samples; at 16 it needs 292 MiB, just too much."""
    own = sampler()
    found = study(own)
    found.optimize(objective, n_trials=12, callbacks=[own.stop_when_settled])
    assert found.best_params == {"batch": 3, "precision": "bf16"}
    assert len(found.trials) < 8


def test_the_reason_to_stop_is_in_words():
    own = sampler()
    found = study(own)
    found.optimize(objective, n_trials=12, callbacks=[own.stop_when_settled])
    reason = own.stop_reason(found)
    assert reason.startswith(f"stopped after {len(found.trials)} trials: ")
    assert re.search(r": another is expected to gain [01]\.\d% at most$", reason)


def test_where_nothing_can_fit_the_reason_says_that():
    own = sampler(limit_bytes=50 * MIB)
    found = study(own)
    found.optimize(objective, n_trials=12, callbacks=[own.stop_when_settled])
    assert own.stop_reason(found).endswith("chance that anything left fits")
    assert len(found.trials) < 6


@pytest.mark.parametrize("predicts", [True, False])
def test_nothing_is_proposed_twice_until_nothing_is_left(predicts: bool):
    """Then the best is proposed again."""
    found = study(sampler(predicts))
    found.optimize(objective, n_trials=13)
    once = {tuple(params.items()) for params in proposed(found)[:12]}
    assert len(once) == 12
    assert proposed(found)[12] == {"batch": 3, "precision": "bf16"}


def test_the_same_seed_proposes_the_same():
    first, second = study(sampler(seed=3)), study(sampler(seed=3))
    for each in (first, second):
        each.optimize(objective, n_trials=6)
    assert proposed(first) == proposed(second)


def test_what_is_believed_is_thought_out_once_for_each_trial():
    own = sampler()
    found = study(own)
    found.optimize(objective, n_trials=2)
    before = own.acquisition(found)
    assert own.acquisition(found) is before
    found.optimize(objective, n_trials=1)
    assert [len(each.observed) for each in (before, own.acquisition(found))] == [2, 3]


def test_another_process_goes_on_as_the_first_would_have(tmp_path: Path):
    """All that it knows is in the study."""
    whole = study()
    whole.optimize(objective, n_trials=6)
    url = f"sqlite:///{tmp_path}/study.db"
    study(storage=url, study_name="halves").optimize(objective, n_trials=3)
    rest = optuna.load_study(study_name="halves", storage=url, sampler=sampler())
    rest.optimize(objective, n_trials=3)
    assert proposed(rest) == proposed(whole)


def test_trials_in_flight_are_not_proposed_again():
    found = study()
    asked = [found.ask(DISTRIBUTIONS) for _ in range(12)]
    assert len({tuple(trial.params.items()) for trial in asked}) == 12


def test_what_fails_is_not_proposed_again_and_soon_its_like_neither():
    """Nothing with bf16 runs: two trials of six are enough to give it up and stop."""

    def fails(trial: optuna.Trial) -> float:
        speed = objective(trial)
        if trial.params["precision"] == "bf16":
            raise RuntimeError("no bf16 here")
        return speed

    own = sampler(limit_bytes=None)
    found = study(own)
    found.optimize(fails, n_trials=12, catch=(RuntimeError,), callbacks=[own.stop_when_settled])
    params = proposed(found)
    assert len({tuple(each.items()) for each in params}) == len(params) <= 6
    assert own.configurations.rows[own.acquisition(found).best].params == {"batch": 5, "precision": "fp32"}


def test_a_failed_trial_that_was_run_again_counts_as_what_came_of_it():
    own = sampler()
    found = study(own)
    lost = found.ask(DISTRIBUTIONS)
    found.tell(lost, state=TrialState.FAIL)
    found.enqueue_trial(lost.params)
    found.optimize(objective, n_trials=1)
    assert own.acquisition(found).failure is None


def test_a_trial_that_was_never_run_says_nothing_of_its_configuration():
    own = sampler()
    found = study(own)
    asked = found.ask(DISTRIBUTIONS)
    withdraw(asked)
    found.tell(asked, state=TrialState.FAIL)
    assert own.acquisition(found).observed == ()
    assert found.ask(DISTRIBUTIONS).params == asked.params


def test_trials_outside_its_configurations_are_left_aside():
    own = sampler()
    found = study(own)
    found.enqueue_trial({"batch": 0})
    found.tell(found.ask({"batch": IntDistribution(0, 5)}), 7.0)
    assert own.acquisition(found).observed == ()


def test_values_alone_are_enough():
    """An objective that says nothing of memory: without a limit, its value is the speed."""
    own = sampler(limit_bytes=None)
    found = study(own)
    found.optimize(
        lambda trial: log_speed(
            trial.suggest_int("batch", 0, 5), trial.suggest_categorical("precision", ("fp32", "bf16"))
        ),
        n_trials=12,
        callbacks=[own.stop_when_settled],
    )
    assert found.best_params == {"batch": 5, "precision": "bf16"}


def test_a_parameter_that_it_was_not_given_is_refused_by_name():
    with pytest.raises(ValueError, match="lr: must be one of batch, precision"):
        study().ask().suggest_float("lr", 0, 1)


def test_a_study_that_minimizes_is_refused():
    with pytest.raises(ValueError, match="must be maximize, but got minimize"):
        optuna.create_study(direction="minimize", sampler=sampler()).ask(DISTRIBUTIONS)


def test_a_study_of_two_objectives_is_refused():
    with pytest.raises(ValueError, match="multi-objective"):
        optuna.create_study(directions=["maximize", "maximize"], sampler=sampler()).ask(DISTRIBUTIONS)


def test_no_configuration_at_all_is_refused():
    with pytest.raises(ValueError, match="at least one configuration is needed"):
        Configurations([], DISTRIBUTIONS)


def test_of_each_combination_the_batches_about_the_largest_predicted_to_fit_are_kept():
    """fp32 takes 100 + 20 MiB for each sample: at 300 MiB 8 fit, so 16 is the one beyond, and 1 to 4 the three below.
    bf16 takes 12: 16 fit, 32 is beyond, 2 to 8 are below."""
    kept = sampler().configurations.derived(300 * MIB)
    batches = {
        kind: [row.micro_batch for row in kept.rows if row.params["precision"] == kind] for kind in ("fp32", "bf16")
    }
    assert batches == {"fp32": [1, 2, 4, 8, 16], "bf16": [2, 4, 8, 16, 32]}


def test_where_nothing_is_predicted_every_batch_is_kept():
    assert len(sampler(predicts=False).configurations.derived(300 * MIB)) == 12


def test_packed_batches_have_a_ladder_of_their_own_and_are_told_apart():
    """Of five padded batches those of at most 100 MiB and one more are kept, and of packed ones likewise."""
    rows = [
        Configuration({"batch": place}, micro, Prediction(peak_bytes=25 * micro * MIB), packed=packed)
        for place, (micro, packed) in enumerate(itertools.product((1, 2, 4, 8, 16), (False, True)))
    ]
    both = Configurations(rows, {"batch": IntDistribution(0, 9)}, "batch")
    kept = both.derived(100 * MIB).rows
    assert sorted((row.packed, row.micro_batch) for row in kept) == [
        (packed, micro) for packed in (False, True) for micro in (1, 2, 4, 8)
    ]
    assert len({*both.inputs()[0][:, 0].tolist()}) == 10
