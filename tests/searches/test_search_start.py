"""``search --start``: a plan's settings are tried first."""

from __future__ import annotations

from pathlib import Path

import pytest
from search_tables import FINGERPRINT, REFERENCE, options, run_search

from autotune.errors import PlanError
from autotune.plan import Foreseen, Plan, TaskRef
from autotune.techniques import Settings
from autotune.techniques.checkpointing import Checkpointing
from autotune.units import MIB

HALF = REFERENCE.having(Checkpointing(kind="blocks", every=2))
"""Slower than the job as it stands, so that no sampler would begin with it."""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: object) -> None:
    monkeypatch.chdir(tmp_path)


def written(settings: Settings, fingerprint: str = FINGERPRINT) -> Path:
    """As ``autotune fit`` writes it."""
    found = Foreseen(process=MIB, low=MIB, high=MIB, reference=MIB, work=1.1, binds="backward")
    plan = Plan(settings=settings, task=TaskRef(source="model.py", fingerprint=fingerprint), predicted=found)
    plan.save("start.yaml")
    return Path("start.yaml")


@pytest.mark.parametrize("sampler", ["gain", "random"])
def test_its_settings_come_right_after_the_job_as_it_stands(sampler):
    assert run_search(options(start=written(HALF), sampler=sampler)).measured[:2] == [REFERENCE, HALF]


def test_a_plan_without_a_batch_has_the_jobs_own():
    plan = written(HALF.model_copy(update={"batch": None}))
    assert run_search(options(start=plan)).measured[1] == HALF


def test_the_plan_that_a_search_writes_is_measured_and_not_predicted():
    assert run_search(options(start=written(HALF))).plan.predicted is None


def test_a_plan_of_another_job_is_refused():
    with pytest.raises(PlanError, match=r"--start start\.yaml: the plan is of model\.py, and this is another job"):
        run_search(options(start=written(HALF, "sha256:" + "b" * 64)))


def test_settings_that_the_space_has_not_are_tried_all_the_same():
    other = HALF.having(Checkpointing(kind="chosen", blocks=(3,)))
    assert run_search(options(start=written(other))).measured[1] == other
