"""Loader and optimizer settings: found apart from everything else, confirmed together with the best."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from search_tables import MIB, Run, configurations, facts, options, row, run_search

from autotune.estimates import Prediction
from autotune.search_spaces import load_space
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.data_loading import DataLoading
from autotune.techniques.optimizers.optimizer import Optimizer
from autotune.techniques.precision import Precision
from autotune.workers.table import Row

SPACE = "schema: autotune/space@1\nbatch: auto\nprecision: auto\ndata_loading: auto\noptimizer: auto\n"
BF16 = Settings(batch=Batch(micro=64), precision=Precision(kind="bf16"))
CACHED = DataLoading(num_workers=0, cache="host")
WORKERS = DataLoading(num_workers=1, prefetch_factor=2, persistent_workers=True)

pytestmark = pytest.mark.usefixtures("in_memory")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("space.yaml").write_text(SPACE)


def search(load_s: float, update_s: float, dataset_bytes: int = 10**6, known: dict | None = None, **changes) -> Run:
    """A step of 64 samples takes 640 ms, in bf16 half of that, 10 ms for each micro-batch, and the loader's and the
    optimizer's seconds: of these, workers and a cached epoch save all, and a fused optimizer half."""
    rates = {"loader_samples_per_s": {0: 64 / max(load_s, 1e-6), 1: 1e9}, "dataset_bytes": dataset_bytes}
    found = facts(**{**rates, **(known or {})})
    rows = [_row(settings, load_s, update_s) for settings in configurations(found, load_space("space.yaml"))]
    asked = options(**{"trials": 30, **changes})
    return run_search(asked, known=found, rows=rows, predict=lambda settings: Prediction(peak_bytes=MIB))


def _row(settings: Settings, load_s: float, update_s: float) -> Row:
    load_s = load_s if settings.data_loading == DataLoading() else 0.0
    update_s /= 2 if settings.optimizer.kind == "fused" else 1
    compute_s = (0.32 if settings.precision.kind == "bf16" else 0.64) + 0.01 * settings.batch.accumulate
    seconds = compute_s + load_s + update_s
    return row(
        settings,
        samples_per_s=(64 / seconds,),
        peak_bytes=(MIB,),
        loader_wait=load_s / seconds,
        optimizer_share=update_s / seconds,
    )


def test_what_takes_no_time_is_not_tried():
    """3 ms of 333 are below 1 %."""
    run = search(load_s=0.003, update_s=0.003)
    assert run.plan.settings == BF16
    assert {(settings.data_loading, settings.optimizer) for settings in run.measured} == {(DataLoading(), Optimizer())}


def test_what_takes_time_is_tried_with_the_best_of_everything_else_and_last():
    run = search(load_s=0.010, update_s=0.010)
    apart = [at for at, settings in enumerate(run.measured) if settings.optimizer != Optimizer()]
    assert [run.measured[at].optimizer.kind for at in apart] == ["fused", "foreach", "for_loop"]
    assert apart == list(range(len(run.measured)))[-3:]
    assert all(settings.precision == BF16.precision and settings.batch == BF16.batch for settings in run.measured[-3:])
    assert run.plan.settings.data_loading in (CACHED, WORKERS)
    assert run.plan.settings.optimizer.kind == "fused"
    assert run.plan.search.stopped.startswith("stopped after")


def test_a_loader_that_starves_the_reference_is_replaced_before_anything_else_is_tried():
    """100 ms of 750: with it, bf16 would seem to gain a third less. The cache is the fastest by itself."""
    run = search(load_s=0.100, update_s=0.0)
    assert {settings.data_loading for settings in run.measured[1:]} == {CACHED}
    assert run.plan.settings == BF16.model_copy(update={"data_loading": CACHED})


def test_where_an_epoch_does_not_fit_the_workers_that_load_fastest_replace_it():
    run = search(load_s=0.100, update_s=0.0, dataset_bytes=2**60)
    assert {settings.data_loading for settings in run.measured[1:]} == {WORKERS}


def test_the_last_trials_are_kept_for_what_is_to_be_confirmed():
    run = search(load_s=0.0, update_s=0.010, trials=5)
    assert [settings.optimizer.kind for settings in run.measured] == ["default"] * 2 + ["fused", "foreach", "for_loop"]


def test_where_one_trial_is_left_it_is_the_most_promising():
    """Of the reference itself nothing is confirmed before anything else was tried: bf16 halves the step."""
    run = search(load_s=0.0, update_s=0.010, trials=2)
    assert run.measured[1].precision == BF16.precision


def test_each_choice_is_confirmed_once():
    run = search(load_s=0.010, update_s=0.010)
    tried = [settings.optimizer.kind for settings in run.measured]
    assert {kind: tried.count(kind) for kind in ("fused", "foreach", "for_loop")} == dict.fromkeys(tried[-3:], 1)
    assert math.isclose(run.plan.measured.samples_per_s.value, 64 / 0.335, rel_tol=1e-3)


def test_a_study_that_another_sampler_began_is_gone_on_with():
    search(load_s=0.010, update_s=0.010, trials=8, sampler="tpe")
    run = search(load_s=0.010, update_s=0.010, resume=True)
    assert run.plan.settings.precision == BF16.precision
    assert run.plan.settings.optimizer.kind == "fused"


def test_a_cached_epoch_that_leaves_no_room_is_not_taken():
    """The reference uses 1 MiB of 2: a second one that is to hold an epoch of 1 MiB is above the margin."""
    run = search(load_s=0.100, update_s=0.0, dataset_bytes=MIB, budget=2 * MIB)
    assert {settings.data_loading for settings in run.measured[1:]} >= {WORKERS}
    assert run.measured[1].data_loading == WORKERS


def test_loader_workers_on_a_cpu_are_confirmed_although_nothing_waits_for_them():
    own = {"loader_options": {"num_workers": 2}, "loader_samples_per_s": {0: 1e6, 1: 1e7, 2: 1e8}}
    assert {settings.data_loading.cache for settings in search(load_s=0.0, update_s=0.0, known=own).measured} == {
        "none",
        "host",
    }
