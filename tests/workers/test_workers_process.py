"""A trial's process is that of a job: the same file, as a task and by itself, is told the same by kernel and Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from process_facts import INTENDED, differences, job_facts, trial_facts

_PYTESTS = {"$PYTEST_CURRENT_TEST", "$COLUMNS", "$LINES", "$_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"}
"""What pytest sets from one moment to the next, and torch where another test has compiled a model."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return job_facts(tmp_path_factory.mktemp("job"))


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [False, True], ids=["forked", "fresh"])
@pytest.mark.parametrize("name", ["local_executor", "ray_executor"])
def test_a_trial_is_told_what_a_job_is(
    name: str, fresh: bool, job: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
):
    """Priority, processors, threads, limits, cgroup, signals, environment: Ray's workers run at nice 15, a job at 0."""
    trial = trial_facts(request.getfixturevalue(name), tmp_path, fresh)
    found = differences(job, trial)
    assert {fact: found[fact] for fact in found.keys() - INTENDED.keys() - _PYTESTS} == {}
    assert len(job) > 60
