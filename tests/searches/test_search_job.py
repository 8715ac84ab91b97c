"""A real search of a job that trains as 8 x 4 in bf16 with clipping: that job is the reference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_search import search_until_a_round

import autotune
from autotune.plan import load_plan
from autotune.searches.events import TrialEnded
from autotune.searches.options import SearchOptions
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.workers.local import LocalExecutor

TASK = "states_its_job.py"
SPACE = "schema: autotune/space@1\nbatch: [{micro: 8, accumulate: 4}, {micro: 32}]\nprecision: auto\n"


@pytest.fixture
def folder(folder: Path, elsewhere: None) -> Path:
    (folder / "space.yaml").write_text(SPACE)
    return folder


@pytest.mark.slow
def test_the_reference_is_the_job_and_the_gain_is_against_it(folder: Path, local_executor: LocalExecutor):
    """Its processes run four bf16 passes of 8 samples to a step, whose gradient is clipped; so does the plan's job."""
    options = SearchOptions(task=TASK, space="space.yaml", trials=2, trial_time=0.2, sampler="random", device="cpu")
    plan, events = search_until_a_round(options, local_executor)
    ended = [event for event in events if isinstance(event, TrialEnded)]
    job = Settings(batch=Batch(micro=8, accumulate=4))
    assert (ended[0].number, ended[0].settings, ended[0].outcome.kind) == (0, job, "measured")
    assert all(event.feasible for event in ended), [event.outcome for event in ended]
    assert plan.gain is not None
    assert plan.measured is not None
    assert plan.reference is not None
    assert plan.gain.speed is not None
    assert plan.measured.samples_per_s.repeats == plan.reference.samples_per_s.repeats == 1

    seen = [json.loads(path.read_text()) for path in (folder / "seen").iterdir()]
    as_job = [rows for rows in seen if [row.get("samples") for row in rows[:10]] == ([8] * 4 + [None]) * 2]
    rows = [row for each in as_job for row in each[:10]]
    assert "torch.bfloat16" in [row.get("type") for row in rows]  # beside what was tried in fp32
    assert max(row["norm"] for row in rows if "norm" in row) == pytest.approx(0.5, rel=1e-3)

    applied = autotune.apply(load_plan("plan.yaml"), autotune.load_task(TASK))
    assert applied.settings == plan.settings
    assert applied.settings.precision.kind in ("bf16", "fp32")
