"""``verify`` and ``--dry-run``, over a table."""

from __future__ import annotations

from pathlib import Path

import pytest
from search_tables import MIB, configurations, facts, options, peak, row, run_search, speed

from autotune.commands.preview import preview_search
from autotune.commands.verify import verify_plan
from autotune.errors import PlanError, SpaceError, TaskError
from autotune.plan import Plan
from autotune.results import Verification
from autotune.techniques import Facts, Settings
from autotune.techniques.batch import Batch
from autotune.workers import Crashed, Failed, OutOfMemory
from autotune.workers.table import Row, TableExecutor

SMALL = "schema: autotune/space@1\nprecision: auto\nallocator: auto\n"


pytestmark = pytest.mark.usefixtures("in_memory", "small_space")


@pytest.fixture
def plan() -> Plan:
    found = run_search(options(budget=600 * MIB)).plan
    assert found is not None
    return found


def check(plan: Plan, changed: Row | None = None, known: Facts | None = None) -> tuple[Verification, TableExecutor]:
    rows = [row(settings) for settings in configurations(facts())] + ([changed] if changed else [])
    executor = TableExecutor(known or facts(), rows)
    return verify_plan(plan, "model.py", executor, lambda words: None), executor


def test_a_plan_that_is_as_it_was_holds(plan: Plan):
    found, executor = check(plan)
    assert found.holds
    assert found.slower is None
    assert found.warnings == ()
    assert found.measured.samples_per_s.value == plan.measured.samples_per_s.value
    assert found.measured.peak == plan.measured.peak
    assert [request.fresh for request in executor.requests] == [False, True, True, True]


def test_one_repeat_over_the_budget_is_over_the_budget(plan: Plan):
    peaks = (MIB, 600 * MIB, MIB)
    found, _ = check(plan, row(plan.settings, samples_per_s=(100.0,) * 3, peak_bytes=peaks))
    assert found.over_budget == "over the budget by 18 MiB, margin included"
    assert not found.holds


def test_running_out_of_memory_is_over_the_budget(plan: Plan):
    found, executor = check(plan, row(plan.settings, outcome=OutOfMemory(peak_bytes=700 * MIB, message="the kernel")))
    assert found.over_budget == "out of memory at 700 MiB: the kernel"
    assert found.measured is None
    assert len(executor.requests) == 2


def test_slower_than_the_plans_interval_is_said_and_still_holds(plan: Plan):
    found, _ = check(plan, row(plan.settings, samples_per_s=(speed(plan.settings) / 2,)))
    assert found.slower is not None
    assert "50.0% below" in found.slower
    assert found.holds


def test_a_little_slower_within_the_intervals_is_not_slower(plan: Plan):
    found, _ = check(plan, row(plan.settings, samples_per_s=(speed(plan.settings) * 0.99,)))
    assert found.slower is None


def test_a_plan_for_another_model_is_refused(plan: Plan):
    with pytest.raises(PlanError, match=r"found for model.py \(sha256:aaa.*is another task .*its parameters"):
        check(plan, known=facts(fingerprint="sha256:" + "b" * 64))


def test_another_torch_is_a_warning(plan: Plan):
    found, _ = check(plan, known=facts(torch_version="2.99"))
    assert found.warnings == ("the plan was measured with torch 2.13.0, and this is 2.99",)
    assert found.holds


def test_what_cannot_be_had_here_is_refused_by_name(plan: Plan):
    with pytest.raises(PlanError, match=r"settings.allocator: cannot be had here: tcmalloc is not installed"):
        check(plan, known=facts(allocators=()))


def test_a_task_that_fails_is_a_task_error(plan: Plan):
    with pytest.raises(TaskError, match="ValueError: boom"):
        check(plan, row(plan.settings, outcome=Failed(message="ValueError: boom", traceback="Traceback")))
    with pytest.raises(TaskError, match="SIGSEGV"):
        check(plan, row(plan.settings, outcome=Crashed(message="SIGSEGV")))


def test_a_plan_that_leaks_does_not_hold(plan: Plan):
    found, _ = check(plan, row(plan.settings, leak_bytes_per_step=4.0 * MIB))
    assert not found.holds
    assert found.over_budget == "leaks about 4 MiB each step: it outgrows any budget"


def test_another_batch_size_or_thread_count_is_said(plan: Plan):
    found, _ = check(plan, known=facts(effective_batch=256, num_threads=4))
    assert found.holds
    said = "; ".join(found.warnings)
    assert "an optimizer step of the plan sees 64 samples, and the task's batch size is 256" in said
    assert "measured with 2 threads, and here are 4" in said


def test_a_plan_written_by_hand_is_measured_without_anything_to_compare():
    settings = Settings(batch=Batch(micro=64))
    found, _ = check(Plan(settings=settings).on("cpu"))
    assert found.holds
    assert found.measured is not None
    assert found.measured.peak.process >= peak(settings)


def test_a_dry_run_counts_the_space_and_measures_nothing():
    executor = TableExecutor(facts(), [])
    found = preview_search(options(trials=3), executor)
    assert {name: len(row) for name, row in found.choices.items()} == {"precision": 2, "allocator": 2}
    assert (found.num_configurations, found.num_trials) == (4, 3)
    assert found.num_likely == 3
    assert 0 < found.expected.low_s <= found.expected.high_s <= found.expected.most_s
    assert [request.kind for request in executor.requests] == ["inspect"]
    assert sorted(path.name for path in Path().iterdir()) == ["space.yaml"]


def test_a_dry_run_names_what_cannot_be_had():
    Path("space.yaml").write_text("schema: autotune/space@1\nprecision: [{kind: fp32}, {kind: tf32}]\n")
    (missing,) = preview_search(options(), TableExecutor(facts(), [])).unavailable
    assert missing.setting.model_dump() == {"kind": "tf32"}


def test_a_dry_run_of_a_bad_space_is_a_space_error():
    Path("space.yaml").write_text("schema: autotune/space@1\nprecison: auto\n")
    with pytest.raises(SpaceError, match="precison"):
        preview_search(options(), TableExecutor(facts(), []))
