"""What a batch is read from: jobs with every fault named at once, and a hash of what a task's code is."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.batch.jobs import load_jobs
from autotune.errors import UserError
from autotune.searches.reuse import code_hash
from autotune.units import MIB

TASK = "def build_model(): ...\ndef build_dataset(): ...\ndef compute_loss(model, batch): ...\n"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(TASK)


def read(*jobs: str, head: str = ""):
    """The batch of these rows."""
    Path("jobs.yaml").write_text(head + "jobs:\n" + "".join(f"  - {{{job}}}\n" for job in jobs))
    return load_jobs(Path("jobs.yaml"))


def test_a_job_is_a_search_with_its_options():
    """Sizes and times as on the command line; what is not given is a search's default."""
    batch = read("name: a, task: model.py, budget: 512MiB, max_time: 2m", "name: b, task: model.py, budget: 90%")
    first, second = (job.options(Path("plans"), "cpu", False) for job in batch.jobs)
    assert (first.budget, first.max_time) == (512 * MIB, 120.0)
    assert (second.budget, second.trials) == (0.9, 24)
    assert (first.output, first.stem, first.device) == (Path("plans/a.yaml"), "a", "cpu")
    assert first.storage != second.storage  # each study has a file of its own: they are written at once


def test_jobs_of_one_task_are_in_one_lane_by_priority_and_the_largest_budget_first():
    batch = read(
        "name: small, task: model.py, budget: 1GiB",
        "name: large, task: model.py, budget: 2GiB",
        "name: urgent, task: model.py, budget: 512MiB, priority: 2",
        "name: other, task: 'model.py:task'",
    )
    lanes = [[job.name for job in lane] for lane in batch.lanes()]
    assert lanes == [["urgent", "large", "small"], ["other"]]


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ("name: a, task: model.py, bugdet: 8GiB", "jobs.0.bugdet: unknown key. Use one of: seed, effective_batch"),
        ("name: a, task: model.py, device: tpu", "jobs.0.device: cpu or cuda was expected, or a type of them"),
        ("name: a, task: model.py, budget: 8", "Was 8GiB meant?"),
        ("name: a, task: model.py, priority: 0", "jobs.0.priority: Input should be greater than 0"),
        ("name: a", "write either `task: model.py` or `command:"),
        ("name: a, task: model.py, flags: 'off'", "--flags is for a script's own"),
        ("name: a, task: model.py, scratch: copy", "--scratch is for a script's trials"),
        ("name: a, task: model.py, command: python x.py", "write either `task: model.py` or `command:"),
        ("name: ../a, task: model.py", "jobs.0.name: String should match pattern"),
        ("name: a, task: missing.py", "jobs.0 (a): missing.py: no such file."),
        ("name: a, task: model.py, space: none.yaml", "jobs.0 (a): none.yaml: neither a file nor a preset."),
        ("name: a, task: train.py", "jobs.0 (a): train.py: defines none of build_model"),
        ("name: a, command: ./train.sh", "jobs.0 (a): ./train.sh: no script that Python runs."),
        ("name: summary, task: model.py", "summary writes plans/summary.yaml, which is the batch's summary."),
        ("name: a, task: model.py, output: jobs.yaml", "a writes jobs.yaml, which is the list of jobs."),
        ("name: a, task: model.py, output: ./x/../model.py", "a writes x/../model.py, which is a task."),
        ('name: a, task: model.py, output: "a\\0b"', "jobs.0.output: no path has a null byte"),
        ('name: a, command: ""', "jobs.0.command: it must not be empty"),
        ("name: a, command: []", "jobs.0.command: it must not be empty"),
        ("name: a, task: model.py, after: b", "jobs.0.after: unknown key."),
    ],
)
def test_a_fault_is_told_with_its_place(job, said):
    Path("train.py").write_text("print('training')\n")
    with pytest.raises(UserError) as error:
        read(job)
    assert said in str(error.value)


def test_what_stands_twice_is_refused():
    """Names, and outputs: whichever way they are spelled, and where one job names what is another's by itself."""
    with pytest.raises(UserError, match=r"2 are called a\."):
        read("name: a, task: model.py, output: p.yaml", "name: a, task: model.py, output: q.yaml")
    with pytest.raises(UserError, match=r"a, b write one file\."):
        read("name: a, task: model.py, output: p.yaml", "name: b, task: model.py, output: ./p.yaml")
    with pytest.raises(UserError, match=r"a, b write one file\."):
        read("name: a, task: model.py, output: plans/b.yaml", "name: b, task: model.py")


def test_every_fault_is_told_at_once():
    with pytest.raises(UserError) as error:
        read("name: a, task: one.py", "name: b, task: two.py")
    assert len(str(error.value).splitlines()) == 2


def test_a_job_of_several_devices_is_one_for_each():
    """With a plan each; what is said of a row goes by its number in the list."""
    batch = read("name: a, task: model.py, device: ['cuda:A100', cpu], trials: 3", "name: b, task: model.py")
    named = {job.name: (job.device, job.trials, job.plan(Path())) for job in batch.jobs}
    assert named["a-cuda-a100"] == ("cuda:A100", 3, Path("a-cuda-a100.yaml"))
    assert named["a-cpu"] == ("cpu", 3, Path("a-cpu.yaml"))
    assert named["b"][0] is None
    with pytest.raises(UserError, match=r"jobs\.1\.trials"):
        read("name: a, task: model.py, device: [cuda, cpu]", "name: b, task: model.py, trials: 0")
    with pytest.raises(UserError, match=r"jobs\.0\.device"):
        read("name: a, task: model.py, device: []")
    with pytest.raises(UserError, match="2 are called a-cpu"):
        read("name: a, task: model.py, device: [cpu, cpu]")
    with pytest.raises(UserError, match="write one file"):
        read("name: a, task: model.py, device: [cuda, cpu], output: plan.yaml")


def test_a_missing_file_is_the_users_error():
    with pytest.raises(UserError, match=r"none\.yaml: no such file"):
        load_jobs(Path("none.yaml"))


def test_an_empty_batch_is_refused():
    Path("jobs.yaml").write_text("jobs: []\n")
    with pytest.raises(UserError, match="jobs: "):
        load_jobs(Path("jobs.yaml"))


@pytest.mark.parametrize(
    ("imports", "changed"),
    [
        ("import blocks", "blocks.py"),
        ("from blocks import Block", "blocks.py"),
        ("from parts import block", "parts/block.py"),
        ("import parts.block", "parts/__init__.py"),
        ("def build():\n    import blocks", "blocks.py"),
        ("import deep", "blocks.py"),
    ],
)
def test_the_hash_is_of_all_that_a_task_imports_from_its_folder(imports, changed):
    """Packages, names of modules, imports within functions, and through each other."""
    Path("parts").mkdir()
    for name in ("blocks.py", "parts/__init__.py", "parts/block.py"):
        Path(name).write_text("A = 1\n")
    Path("deep.py").write_text("import blocks\n")
    Path("model.py").write_text(f"import torch\n{imports}\n")
    before = code_hash(Path("model.py"))
    assert code_hash(Path("model.py")) == before
    Path(changed).write_text("A = 2\n")
    assert code_hash(Path("model.py")) != before


def test_the_hash_leaves_out_what_a_task_does_not_import():
    Path("notes.py").write_text("A = 1\n")
    before = code_hash(Path("model.py"))
    Path("notes.py").write_text("A = 2\n")
    assert code_hash(Path("model.py")) == before


def test_relative_imports_stay_in_the_folder():
    """A package's own, from within it."""
    Path("parts").mkdir()
    Path("parts/__init__.py").write_text("from .block import A\n")
    Path("parts/block.py").write_text("A = 1\n")
    Path("model.py").write_text("import parts\n")
    before = code_hash(Path("model.py"))
    Path("parts/block.py").write_text("A = 2\n")
    assert code_hash(Path("model.py")) != before
