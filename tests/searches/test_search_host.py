"""The host's memory is a budget too: on a card beside the device's, on a CPU the same memory."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from search_tables import BF16, MIB, REFERENCE, Run, configurations, facts, options, row, run_search, small_search

from autotune.commands.verify import verify_plan
from autotune.errors import NothingFits, StudyError, UserError
from autotune.estimates.types import Prediction
from autotune.plan import Budget, Peak, Plan
from autotune.search_spaces import load_space
from autotune.searches.events import TrialEnded
from autotune.searches.sampler.configuration_space import ConfigurationSpace
from autotune.techniques import Device, Settings
from autotune.techniques.offload import Offload
from autotune.workers import OutOfMemory
from autotune.workers.table import TableExecutor

SPACE = "schema: autotune/space@1\nprecision: [{kind: fp32}, {kind: bf16}]\n"
CARD = Device(type="cuda", name="A card", memory_bytes=64 * 2**30, bf16=True, capability=(9, 0))

pytestmark = pytest.mark.usefixtures("in_memory")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("space.yaml").write_text(SPACE)


def on_card(host_budget: int, *, reference: int, bf16: int, **changes: Any) -> Run:
    """Of the host's memory, MiB; of the device's, both take 100 MiB."""
    rows = [
        row(REFERENCE, samples_per_s=(100.0,), peak_bytes=(100 * MIB,), host_bytes=reference * MIB),
        row(BF16, samples_per_s=(200.0,), peak_bytes=(100 * MIB,), host_bytes=bf16 * MIB),
    ]
    asked = options(device="cuda", host_budget=host_budget * MIB, **changes)
    return run_search(asked, known=facts(device=CARD), rows=rows)


def test_what_takes_too_much_of_the_hosts_memory_is_not_the_plan():
    """It is twice as fast, and fits the card."""
    run = on_card(1100, reference=1000, bf16=1100, budget=200 * MIB)
    assert run.plan.settings.precision.kind == "default"
    assert run.plan.budget == Budget(limit=200 * MIB, host=1100 * MIB, device="cuda")
    assert Plan.from_yaml(run.plan.to_yaml()) == run.plan
    assert on_card(1200, reference=1000, bf16=1100, budget=200 * MIB).plan.settings.precision.kind == "bf16"


def test_where_nothing_fits_it_says_which_budget_binds():
    with pytest.raises(NothingFits) as found:
        on_card(900, reference=1000, bf16=1100, budget=200 * MIB)
    assert found.value.exit_code == 3
    said = str(found.value)
    assert "within 200 MiB, 900 MiB of the host's (margin 3%)" in said
    assert "Nearest miss: 1000 MiB of the host's with batch {micro: 64}." in said
    assert "--host-budget 1030MiB would admit it" in said
    assert "--budget" not in said


def test_where_both_bind_both_are_named():
    with pytest.raises(NothingFits, match=r"--budget 103MiB and --host-budget 1030MiB would admit it"):
        on_card(900, reference=1000, bf16=1100, budget=90 * MIB)


def test_a_trial_that_was_ended_for_the_hosts_memory_says_nothing_of_the_cards():
    """2 GiB of the host's are no 2 GiB of a card of 200 MiB."""
    ended = OutOfMemory(peak_bytes=2048 * MIB, message="ended by the watchdog", of_host=True)
    rows = [row(REFERENCE, peak_bytes=(100 * MIB,), host_bytes=MIB), row(BF16, outcome=ended)]
    asked = options(device="cuda", budget=200 * MIB, host_budget=1000 * MIB)
    run = run_search(asked, known=facts(device=CARD), rows=rows)
    assert run.plan.settings.precision.kind == "default"
    (outcome,) = [one.outcome for one in run.seen(TrialEnded) if one.number == 1]
    assert outcome == ended


@pytest.mark.parametrize(("budget", "host_budget"), [(None, 900), (2000, 900), (900, 2000)])
def test_on_a_cpu_the_smaller_of_both_holds(budget: int | None, host_budget: int):
    """The job as it stands takes 1,000 MiB, and bf16 800."""
    rows = [row(REFERENCE, samples_per_s=(200.0,), peak_bytes=(1000 * MIB,)), row(BF16, peak_bytes=(800 * MIB,))]
    limit = None if budget is None else budget * MIB
    run = run_search(options(budget=limit, host_budget=host_budget * MIB), rows=rows)
    assert run.plan.settings.precision.kind == "bf16"
    assert not run.plan.reference.fits


def test_a_host_budget_below_what_a_process_takes_is_refused_before_any_trial():
    with pytest.raises(UserError, match=r"--host-budget 560 MiB: a process is charged 684 MiB before the model"):
        run_search(options(host_budget=560 * MIB), known=facts(process_bytes=684 * MIB))


def test_another_host_budget_is_another_study():
    run_search(options(host_budget=900 * MIB, trials=2), rows=[row(REFERENCE, peak_bytes=(MIB,))])
    with pytest.raises(StudyError, match="--host-budget was 900 MiB, but is 800 MiB"):
        run_search(options(host_budget=800 * MIB, trials=2, resume=True))


def test_verify_holds_it():
    plan = on_card(1200, reference=1000, bf16=1100).plan
    larger = row(plan.settings, samples_per_s=(200.0,), peak_bytes=(100 * MIB,), host_bytes=1300 * MIB)
    found = verify_plan(plan, "model.py", TableExecutor(facts(device=CARD), [larger]), lambda words: None)
    assert found.over_budget == "over the host's budget by 139 MiB, margin included"


def test_of_two_budgets_the_one_that_is_exceeded_most_is_told():
    budget = Budget(limit=100, host=1000, device="cuda", margin=0.0)
    assert budget.over(Peak(process=100, host=1000)) is None
    assert budget.over(Peak(process=110, host=1200)).option == "--host-budget"
    assert budget.over(Peak(process=130, host=1200)).option == "--budget"


def test_without_a_host_budget_a_plan_has_none():
    assert "host" not in small_search().plan.to_yaml()


LOADERS = "schema: autotune/space@1\ndata_loading: auto\n"
RATES = {0: 300.0, 1: 700.0, 2: 1400.0, 4: 2800.0, 8: 5600.0}
"""Of the loader alone: each doubling is tried."""


def by_workers(speeds: dict[int, float], each: int = 100, known: dict | None = None, **changes: Any) -> Run:
    """A search over 0 to 8 loader workers on a card, of which each takes so many MiB of the host's memory beside 1,000
    of the process; nothing else is chosen. Where it is slower than 1,000 samples/s, it waits for data."""
    Path("space.yaml").write_text(LOADERS)
    found = facts(device=CARD, dataset_bytes=2 * MIB, stackable=False, loader_samples_per_s=RATES, **(known or {}))
    rows = []
    for settings in configurations(found, load_space("space.yaml")):
        number = settings.num_loading(found)
        taken = {"host_bytes": (1000 + each * number) * MIB, "workers_bytes": each * number * MIB or None}
        waits = max(0.0, 1 - speeds[number] / 1000)
        rows.append(row(settings, samples_per_s=(speeds[number],), peak_bytes=(MIB,), loader_wait=waits, **taken))
    asked = options(**{"device": "cuda", "trials": 30, "sampler": "random", **changes})
    return run_search(asked, known=found, rows=rows)


def numbers(run: Run) -> set[int]:
    """Of workers that were tried."""
    return {settings.num_loading(facts()) for settings in run.measured}


def test_what_is_expected_to_be_over_the_hosts_budget_is_not_tried():
    """The loader alone took 100 MiB for each worker: 4 would take 1,400 MiB of 1,350, and 8 more than that. Two fit."""
    taken = {number: number * 100 * MIB for number in RATES if number}
    run = by_workers({n: 10.0 * (1 + n) for n in RATES}, known={"loader_bytes": taken}, host_budget=1350 * MIB)
    assert numbers(run) == {0, 1, 2}
    assert run.plan.settings.data_loading.num_workers == 2
    assert run.plan.measured.peak.workers == 200 * MIB
    assert 8 in numbers(by_workers({n: 10.0 * (1 + n) for n in RATES}, known={"loader_bytes": taken}))


def test_what_a_trial_showed_of_workers_is_believed_before_the_loader_alone():
    """It took 10 MiB a worker by itself, and takes 400 beside the training: after one trial that is known."""
    taken = {number: number * 10 * MIB for number in RATES if number}
    run = by_workers({n: 10.0 * (1 + n) for n in RATES}, 400, {"loader_bytes": taken}, host_budget=1350 * MIB)
    tried = [settings.num_loading(facts()) for settings in run.measured]
    first = next(at for at, number in enumerate(tried) if number)
    assert all(number <= max(tried[first], 0) for number in tried[first:])
    assert run.plan.settings.num_loading(facts()) == 0


def test_more_workers_than_it_takes_for_nothing_to_wait_are_not_tried():
    """With two, nothing waits: four and eight gain nothing."""
    run = by_workers({0: 300.0, 1: 600.0, 2: 1000.0, 4: 1000.0, 8: 1000.0})
    assert run.plan.settings.data_loading.num_workers == 2
    tried = [settings.num_loading(facts()) for settings in run.measured]
    assert max(tried[tried.index(2) :]) <= 2


def test_where_many_workers_came_first_the_fewest_that_keep_up_by_themselves_are_tried_too():
    """The reference waits for data, so that everything is searched with the loader that is fastest by itself: 8. Two
    load 1,400 samples/s by themselves, and the training takes 1,000."""
    run = by_workers({0: 300.0, 1: 600.0, 2: 1000.0, 4: 1000.0, 8: 1000.0}, sampler="gain")
    assert numbers(run) == {0, 2, 8}
    assert run.plan.settings.data_loading.num_workers == 2


@pytest.mark.parametrize(("gained", "chosen"), [(1.03, 2), (1.2, 8)])
def test_more_workers_are_the_plan_only_where_they_are_faster_beyond_noise(gained: float, chosen: int):
    """A trial is within 3 % of the next one of the same. All wait for data, so that none is at the knee by that."""
    run = by_workers({0: 300.0, 1: 400.0, 2: 600.0, 4: 600.0 * gained, 8: 600.0 * gained**2})
    assert run.plan.settings.data_loading.num_workers == chosen


@pytest.mark.parametrize(("moved", "is_tried"), [(300, True), (600, False)])
def test_what_a_step_is_predicted_to_keep_on_the_host_counts_for_its_budget(moved: int, is_tried: bool):
    """Of 1,400 MiB, the job takes 1,000 without it; it alone fits the card."""
    Path("space.yaml").write_text("schema: autotune/space@1\noffload: [{kind: none}, {kind: activations, to: host}]\n")
    known, away = facts(device=CARD, num_blocks=2), Offload(kind="activations", to="host")

    def predict(settings: Settings) -> Prediction:
        is_away = settings.offload == away
        return Prediction(peak_bytes=(50 if is_away else 200) * MIB, host_bytes=moved * MIB if is_away else 0)

    rows = [
        row(one, peak_bytes=(predict(one).peak_bytes,), host_bytes=1000 * MIB)
        for one in configurations(known, load_space("space.yaml"))
    ]
    executor = TableExecutor(known, rows, predict=predict)
    asked = options(device="cuda", budget=100 * MIB, host_budget=1400 * MIB)
    with nullcontext() if is_tried else pytest.raises(NothingFits):
        run_search(asked, known=known, executor=executor)
    tried = (one.plan.settings.offload for one in executor.requests if one.kind == "measure")
    assert (away in tried) == is_tried


@pytest.mark.parametrize("stock_fits", [True, False])
def test_what_trials_kept_on_the_host_for_a_step_is_not_counted_twice(stock_fits: bool):
    """Each that moves 600 MiB was seen to take 1,600 with them, of 1,800; bf16 is the faster."""
    Path("space.yaml").write_text(f"{SPACE}offload: [{{kind: none}}, {{kind: activations, to: host}}]\n")
    known, away = facts(device=CARD, num_blocks=2), Offload(kind="activations", to="host")

    def predict(settings: Settings) -> Prediction:
        is_away = settings.offload == away
        return Prediction(peak_bytes=(50 if is_away else 200) * MIB, host_bytes=600 * MIB if is_away else 0)

    stock: dict[str, Any] = {"outcome": OutOfMemory(peak_bytes=200 * MIB, message="CUDA out of memory")}
    if stock_fits:
        stock = {"samples_per_s": (50.0,), "peak_bytes": (90 * MIB,), "host_bytes": 1000 * MIB}
    rows = []
    for one in configurations(known, load_space("space.yaml")):
        speed = 200.0 if one.precision.kind == "bf16" else 100.0
        moved = {"samples_per_s": (speed,), "peak_bytes": (50 * MIB,), "host_bytes": 1600 * MIB}
        rows.append(row(one, **(moved if one.offload == away else stock)))
    asked = options(device="cuda", budget=100 * MIB, host_budget=1800 * MIB)
    run = run_search(asked, known=known, executor=TableExecutor(known, rows, predict=predict))
    assert (run.plan.settings.offload, run.plan.settings.precision.kind) == (away, "bf16")


def test_without_a_host_budget_nobody_asks_what_steps_keep_there(monkeypatch: pytest.MonkeyPatch):
    """Of no candidate."""
    asked: list[Settings] = []
    monkeypatch.setattr(ConfigurationSpace, "host_bytes", lambda space, settings: asked.append(settings) or 0)
    small_search()
    assert not asked
    on_card(1200, reference=1000, bf16=1100)
    assert asked
