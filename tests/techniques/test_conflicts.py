"""Settings that do not go together are said of a plan, a task and a space: here bf16 with tcmalloc, or accumulated."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from line_task import floats, line, training_of
from search_tables import SPACE, facts, options, run_search

import autotune
from autotune.errors import PlanError
from autotune.plan import Plan
from autotune.searches import events
from autotune.searches.requests import check_plan, reference_settings
from autotune.searches.sampler.configuration_space import ConfigurationSpace
from autotune.techniques import Settings
from autotune.techniques.precision import Precision

REASON = "bf16 does not go with tcmalloc: use kind: system for the allocator"
PLAN = "schema: autotune/plan@1\nsettings:\n  precision: {kind: bf16}\n  allocator: {kind: tcmalloc}\n"


def refuses(self: Precision, settings: Settings) -> str | None:
    if self.kind == "bf16" and settings.batch is not None and settings.batch.accumulate == 3:
        return "bf16 does not go with accumulation"
    return REASON if self.kind == "bf16" and settings.allocator.kind == "tcmalloc" else None


@pytest.fixture(autouse=True)
def _refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Precision, "conflicts", refuses)
    monkeypatch.chdir(tmp_path)


def test_a_plan_that_holds_both_is_refused_as_it_is_read():
    Path("plan.yaml").write_text(PLAN)
    with pytest.raises(PlanError) as error:
        autotune.load_plan("plan.yaml")
    assert str(error.value) == f"plan.yaml: settings: precision: {REASON}"


def test_what_a_task_states_counts_when_a_plan_is_applied():
    """The task accumulates three micro-batches, and trains in bf16; the plan says nothing of either."""
    task = line(floats(6), batch_size=6, micro_batch_size=2)
    assert training_of(task).batch.accumulate == 3
    with pytest.raises(PlanError, match=r"^settings: precision: bf16 does not go with accumulation\.$"):
        training_of(dataclasses.replace(task, precision="bf16"))


def test_what_a_task_states_counts_when_a_plan_is_held_against_it():
    plan = Plan(settings=Settings(allocator={"kind": "tcmalloc"}))
    check_plan(plan, "model.py", facts())
    with pytest.raises(PlanError, match="precision: bf16 does not go with tcmalloc"):
        check_plan(plan, "model.py", facts(precision="bf16"))


def test_a_space_counts_them():
    """7 batches, 2 precisions, 3 ways to checkpoint, 2 allocators: a quarter of 84 has both."""
    space = ConfigurationSpace(SPACE.choices(facts()), reference_settings(facts()), 12)
    assert space.conflicts == {f"precision: {REASON}": 21}
    assert space.num_configurations == 63
    assert len(list(space.shuffled("all"))) == 63


def test_what_a_task_states_counts_in_a_space():
    """A job in bf16: its default row is bf16 too."""
    known = facts(precision="bf16")
    space = ConfigurationSpace(SPACE.choices(known), reference_settings(known), 12, precision="bf16")
    assert space.conflicts == {f"precision: {REASON}": 21}
    assert all(found.allocator.kind == "system" or found.precision.kind == "fp32" for found in space.shuffled("all"))


@pytest.mark.parametrize("sampler", ["gain", "random", "tpe"])
def test_a_search_measures_none_of_them_and_says_how_many(sampler, in_memory):
    run = run_search(options(sampler=sampler, trials=25))
    assert run.measured
    assert not any(found.precision.kind == "bf16" and found.allocator.kind == "tcmalloc" for found in run.measured)
    said = [warned.message for warned in run.seen(events.Warned) if "left out" in warned.message]
    assert said == [f"--space: 21 combinations left out: precision: {REASON}."]
