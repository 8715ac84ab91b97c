"""``autotune batch`` from the command line: two real jobs of one task, what a dry run says of them, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from autotune.plan import load_plan

SPACE = "schema: autotune/space@1\noptimizer: [{kind: default}, {kind: foreach}]\n"
JOBS = """
schema: autotune/jobs@1
jobs:
  - {name: free, task: healthy.py, space: space.yaml, device: cpu, sampler: random, trial_time: 0.2s, trials: 2}
  - {name: held, task: healthy.py, space: space.yaml, device: cpu, sampler: random, trial_time: 0.2s, trials: 2,
     budget: 4GiB, max_time: 10m}
"""


@pytest.fixture
def folder(folder: Path) -> Path:
    (folder / "space.yaml").write_text(SPACE)
    (folder / "jobs.yaml").write_text(JOBS)
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("one_round")
def test_two_real_jobs_of_one_task(here, folder):
    """Each has its plan; the second measured no trial of its own. With --resume nothing runs; a
    dry run says what is known."""
    ended = here("batch", "jobs.yaml", "--executor", "local", "--json", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    rows = {row["name"]: row for row in json.loads(ended.stdout)["jobs"]}
    assert [rows[name]["state"] for name in ("free", "held")] == ["done", "done"]
    for name in rows:
        plan = load_plan(folder / "plans" / f"{name}.yaml")
        assert plan.measured is not None
    known = rows["held"]["known"]
    assert rows["held"]["trials"] + known == 2
    assert yaml.safe_load((folder / "plans" / "summary.yaml").read_text())["jobs"] == list(rows.values())

    resumed = here("batch", "jobs.yaml", "--executor", "local", "--resume", cwd=folder)
    assert (resumed.returncode, resumed.stdout) == (0, "plans/summary.yaml\n")
    assert "free" in resumed.stderr
    assert "trial" not in resumed.stderr.replace("trials", "")

    previewed = here("batch", "jobs.yaml", "--executor", "local", "--dry-run", "--json", cwd=folder)
    first, second = json.loads(previewed.stdout)["jobs"]
    assert (first["name"], first["configurations"]) == ("free", 2)
    assert first["known"] >= known
    assert second["why"] == "after free"


@pytest.mark.slow
@pytest.mark.usefixtures("one_round")
def test_a_search_for_several_budgets_writes_a_plan_for_each(here, folder):
    """What the larger measured counts for the smaller, but for trials that other work disturbed."""
    asked = ("--space", "space.yaml", "--device", "cpu", "--sampler", "random", "--trial-time", "0.2s", "--trials", 2)
    ended = here("search", "healthy.py", "--budget", "4GiB,8GiB", *asked, "--executor", "local", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split()) == ["plan-4GiB.yaml", "plan-8GiB.yaml"]
    small, large = (load_plan(folder / f"plan-{budget}GiB.yaml") for budget in (4, 8))
    assert (small.budget.limit, large.budget.limit) == (4 * 2**30, 8 * 2**30)
    assert [one.search.trials + (one.search.known or 0) for one in (large, small)] == [2, 2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--budget", "8GiB,8GiB"), "8GiB is named twice"),
        (("--budget", "8GiB,9"), "a budget of 9 is 9 bytes"),
        (("--budget", "8GiB,"), "not a size: ''"),
        (("--budget", "8GiB,90%", "--require-proof"), "several cannot be had with --require-proof"),
        (("--budget", "8GiB,90%", "--devices", "all"), "--devices takes one --budget"),
    ],
)
def test_budgets_that_cannot_be_had_are_refused_before_anything_runs(here, folder, words, said):
    ended = here("search", "healthy.py", *words, "--executor", "local", cwd=folder)
    assert ended.returncode == 2
    assert said in " ".join(ended.stderr.split())


def test_a_faulty_list_ends_with_2_before_anything_runs(here, folder):
    (folder / "jobs.yaml").write_text("jobs: [{name: a, task: healthy.py, budget: 8GiB, prio: 1}]\n")
    ended = here("batch", "jobs.yaml", "--executor", "local", cwd=folder)
    assert ended.returncode == 2
    assert "jobs.yaml: jobs.0.prio: unknown key. Use one of: seed, effective_batch" in ended.stderr
    assert not (folder / "plans").exists()
