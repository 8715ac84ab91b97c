"""Bad input, through the command line: a clear message, the right exit code, nothing left behind, nothing lost."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from command_line import PROGRAM, Ended, Running, autotune, environment, start
from real_search import search_until_a_trial

from autotune.plan import Plan, load_plan
from autotune.searches.events import Warned
from autotune.searches.options import SearchOptions
from autotune.workers import InspectRequest

TASKS = Path(__file__).parents[1] / "tasks"
QUICK = ("--executor", "local", "--device", "cpu", "--trials", "2", "--trial-time", "0.2s", "--space", "space.yaml")
SPACE = "schema: autotune/space@1\nbatch: auto\n"
OURS = "/autotune/"


@pytest.fixture
def search(here: Callable[..., Ended], folder: Path) -> Callable[..., Ended]:
    """A search of a task in the folder, with these options beside QUICK."""
    return lambda task, *options: here("search", task, *QUICK, *options, cwd=folder)


def assert_refused(ended: Ended, *words: str, code: int = 2) -> None:
    """It left with ``code``, said all ``words`` and none of our traceback, printed no data and left nothing behind."""
    said = " ".join(ended.stderr.split())
    assert ended.returncode == code, ended.stderr
    assert [word for word in words if word not in said] == [], ended.stderr
    assert "autotune/cli/" not in ended.stderr
    assert "This is a bug in autotune" not in ended.stderr
    assert ended.stdout == ""
    assert ended.left_behind == []


# The task


def test_no_such_file(folder, search):
    ended = search("no_model.py")
    assert_refused(ended, "no_model.py: no such file. `autotune init no_model.py` writes a starting file.")


@pytest.mark.medium
def test_a_file_without_build_model(folder, search):
    (folder / "bare.py").write_text("def build_dataset(): ...\n")
    ended = search("bare.py")
    assert_refused(ended, "bare.py: missing build_model, compute_loss.", "def build_model() -> torch.nn.Module")


def test_a_training_script_is_not_run(folder, here):
    """It would train as "reading the task"; it is told apart before anything starts."""
    (folder / "train.py").write_text("from pathlib import Path\nPath('ran').touch()\nwhile True: pass\n")
    for command in (("search", *QUICK), ("profile", "--device", "cpu"), ("estimate", "--budget", "1GiB")):
        ended = here(command[0], "train.py", *command[1:], cwd=folder)
        assert_refused(ended, "train.py: defines none of build_model, build_dataset, compute_loss, and no `task`.")
    assert not (folder / "ran").exists()


def test_flags_are_for_scripts(search):
    """What was asked for and cannot be had is said."""
    assert_refused(search("healthy.py", "--flags", "off"), "--flags is for a script's own.")


def test_options_of_run_stand_before_the_plan(here, folder):
    """Behind it begins the command: it is not told that no such program is there."""
    ended = here("run", "plan.yaml", "--strict", "--", "python", "-c", "pass", cwd=folder)
    assert_refused(ended, "--strict: options stand before the plan: `autotune run --strict plan.yaml -- python …`.")


@pytest.mark.parametrize(
    "command",
    [
        ("search", "healthy.py", *QUICK),
        ("search", "healthy.py", *QUICK, "--dry-run"),
        ("profile", "healthy.py", "--device", "cpu"),
        ("estimate", "healthy.py", "--budget", "1GiB"),
        ("verify", "plan.yaml", "healthy.py", "--executor", "local"),
    ],
    ids=" ".join,
)
def test_a_command_runs_once_and_not_once_a_rank(command, folder, here):
    (folder / "plan.yaml").write_text(plan_text("sha256:" + 64 * "0"))
    ended = here(*command, cwd=folder, WORLD_SIZE="2", RANK="1", MASTER_ADDR="localhost", MASTER_PORT="29500")
    assert_refused(ended, "started as one of 2 ranks (WORLD_SIZE)", "runs once, not once a rank", "without torchrun")
    assert not (folder / ".autotune").exists()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("hostile_import_error.py", ("ModuleNotFoundError: No module named 'no_such_module'", "import no_such_module")),
        ("hostile_raises.py", ("IndexError: list index out of range", "return widths[0]")),
        ("hostile_nonscalar.py", ("compute_loss",)),
        ("hostile_nan.py", ("not finite",)),
        ("hostile_leak.py", ("leaks", "each step")),
        ("hostile_exits.py", ("sys.exit(3)",)),
        ("hostile_exits_at_once.py", ("exited with code 4",)),
        ("hostile_empty_dataset.py", ("build_dataset returned an empty dataset",)),
        ("hostile_worker_raises.py", ("sample 7 is broken",)),
    ],
)
def test_a_task_that_cannot_be_measured(task, words, folder, search):
    """The message has what went wrong with the user's code, and no frame of ours."""
    ended = search(task)
    assert_refused(ended, *words)
    assert OURS not in ended.stderr


@pytest.mark.slow
def test_a_task_that_ends_its_process_ends_the_command_and_leaves_nothing(folder):
    ended = autotune("search", "hostile_segfault.py", *QUICK, cwd=folder)
    assert_refused(ended, "Segmentation fault (SIGSEGV)")
    assert OURS not in ended.stderr


@pytest.mark.slow
def test_a_task_that_hangs_is_ended_and_told_where(folder, search):
    for most in ("4s", "16s", "64s", "256s"):  # on a busy machine it comes to its loss later
        ended = search("hostile_hang.py", "--max-time", most)
        if "compute_loss" in ended.stderr:
            break
    assert_refused(ended, "did not end within", "compute_loss")


def brief(folder: Path, task: str) -> SearchOptions:
    """What QUICK asks for."""
    return SearchOptions(task=str(folder / task), space="space.yaml", trials=20, trial_time=0.2, device="cpu")


@pytest.mark.medium
def test_a_task_that_prints_a_great_deal_is_measured_and_its_output_kept(folder, local_executor, monkeypatch):
    monkeypatch.chdir(folder)
    search_until_a_trial(brief(folder, "hostile_prints.py"), local_executor)
    logs = list(folder.glob(".autotune/*/*.log"))
    assert logs
    assert all(0 < log.stat().st_size < 100_000 for log in logs)


@pytest.mark.medium
def test_a_dataset_smaller_than_the_batch_caps_the_micro_batch(folder, local_executor, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "small.py").write_text("from healthy import *\nbatch_size = 100\n")
    plan, events = search_until_a_trial(brief(folder, "small.py"), local_executor)
    assert any("fewer than the batch size of 100" in one.message for one in events if isinstance(one, Warned))
    batch = plan.settings.batch
    assert batch is not None
    assert batch.micro <= 64


# The budget


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("8 apples", "not a size: '8 apples'. Write for example 8GiB, 512 MiB or 8GB; 8G is 8GiB."),
        ("8", "a budget of 8 is 8 bytes. Was 8GiB meant?"),
        ("0", "a budget of 0 leaves no memory at all."),
        ("-1GiB", "not a size: '-1GiB'."),
    ],
)
def test_a_budget_that_is_none(budget, words, folder, search):
    assert_refused(search("healthy.py", f"--budget={budget}"), "--budget", words)


@pytest.mark.medium
def test_a_budget_below_the_smallest_configuration(folder, search):
    """What the job takes as it stands is nearly all the process's own: 3 % less is too little for any."""
    ended = search("healthy.py", "--budget", "99%")
    assert_refused(ended, "Nothing fits", "within ", "Nearest miss:", "What would help: --budget", code=3)
    assert not (folder / "plan.yaml").exists()


# Spaces and plans


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("warp_drive: auto", "warp_drive: unknown key. Use one of: schema, batch, precision, variant, pruning"),
        ("precision: [{kind: fp7}]", "precision"),
        ("precision: [{kind: bf16, speed: 11}]", "speed"),
    ],
)
def test_an_unknown_technique_or_value_in_a_space(row, words, folder, search):
    (folder / "space.yaml").write_text(f"{SPACE}{row}\n")
    assert_refused(search("healthy.py"), "space.yaml", words)


def test_an_unknown_space(folder, here):
    ended = here("search", "healthy.py", "--executor", "local", "--space", "outer", cwd=folder)
    assert_refused(ended, "outer", "default")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("warp_drive: {kind: on}", "settings.warp_drive: unknown key. Use one of: batch, precision, variant, pruning"),
        (
            "precision: {kind: fp7}",
            "Input should be 'default', 'fp32', 'tf32', 'bf16', 'fp16' or 'float8'",
        ),
        ("batch: {micro: 0}", "settings.batch.micro: Input should be greater than 0, but got 0"),
    ],
)
def test_an_unknown_technique_or_value_in_a_plan(settings, words, folder, here):
    (folder / "plan.yaml").write_text(f"schema: autotune/plan@1\nsettings:\n  {settings}\n")
    assert_refused(here("show", "plan.yaml", cwd=folder), "plan.yaml", words)


LAUGHS = "a: &a [ha, ha]\n" + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}]\n" for a, b in pairwise("abcdefghi"))


HOSTILE = {
    "malformed": ("settings: [", "not plain YAML"),
    "no mapping": ("- a\n- b\n", "expected a mapping"),
    "python object": ("schema: !!python/object/apply:os.system ['touch hacked']\n", "not plain YAML"),
    "billion laughs": (LAUGHS, "aliases are not allowed"),
    "twice": ("schema: autotune/plan@1\nschema: autotune/plan@1\n", "a key stands twice"),
    "deep": ("[" * 100_000, "not plain YAML"),
    "binary": ("\0", "not plain YAML"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_malformed_or_hostile_yaml(kind, folder, here):
    text, words = HOSTILE[kind]
    (folder / "plan.yaml").write_text(text)
    assert_refused(here("show", "plan.yaml", cwd=folder), "plan.yaml", words)


@pytest.mark.parametrize("command", [("show",), ("verify",), ("run", "--", "true")], ids=lambda command: command[0])
def test_no_command_runs_what_a_plan_holds(command, folder, here):
    (folder / "plan.yaml").write_text(HOSTILE["python object"][0])
    assert_refused(here(command[0], "plan.yaml", *command[1:], cwd=folder), "not plain YAML")
    assert not (folder / "hacked").exists()


EVIDENCE = """\
measured:
  samples_per_s: {value: 1.0, low: 0.9, high: 1.1, repeats: 3}
  peak: {process: 471 MiB}
environment: {torch: 0.4.1, device: An abacus, autotune: 0.1.0, python: 3.11.2}
"""


def plan_text(fingerprint: str, settings: str = "batch: {micro: 8}", budget: str = "8 GiB") -> str:
    return (
        "schema: autotune/plan@1\n"
        f"task: {{source: healthy.py, fingerprint: '{fingerprint}'}}\n"
        f"budget: {{limit: {budget}}}\n"
        f"settings:\n  {settings}\n{EVIDENCE}"
    )


@pytest.fixture
def verify(here: Callable[..., Ended], folder: Path) -> Callable[..., Ended]:
    """Measure the folder's plan again."""
    command = ("verify", "plan.yaml", "--executor", "local", "--trial-time", "0.2s")
    return lambda *options: here(*command, *options, cwd=folder)


@pytest.fixture(scope="module")
def fingerprint(local_executor) -> str:
    """Of the healthy task."""
    request = InspectRequest(id="inspect", task=str(TASKS / "healthy.py"), device="cpu")
    return local_executor.ask(request).facts.fingerprint


@pytest.mark.medium
def test_a_plan_for_another_model(folder, verify):
    (folder / "plan.yaml").write_text(plan_text(f"sha256:{'0' * 64}"))
    assert_refused(verify(), "it was found for healthy.py", "Search again")


@pytest.mark.slow
@pytest.mark.usefixtures("one_round")
def test_a_plan_measured_with_another_torch_is_a_warning(folder, verify, fingerprint):
    """And what the task prints is heard, since that is asked for."""
    with (folder / "healthy.py").open("a") as task:
        task.write("\nprint('the task is read')\n")
    (folder / "plan.yaml").write_text(plan_text(fingerprint))
    ended = verify("--verbose")
    assert ended.returncode == 0, ended.stderr
    assert "the plan was measured with torch 0.4.1, and this is " in ended.stderr
    assert "runs healthy.py" in ended.stderr
    assert all(f"{name} | the task is read" in ended.stderr for name in ("inspect", "verify-1"))
    assert "The plan holds." in ended.stdout


@pytest.mark.medium
def test_a_plan_over_its_budget_does_not_hold(folder, verify, fingerprint):
    (folder / "plan.yaml").write_text(plan_text(fingerprint, budget="16 MiB"))
    ended = verify()
    assert ended.returncode == 3
    assert "The plan does not hold" in ended.stdout


def test_a_plan_runs_no_file_that_is_not_beside_it(folder, verify, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "model.py"
    elsewhere.write_text("raise SystemExit('it ran')")
    text = plan_text(f"sha256:{'0' * 64}")
    (folder / "plan.yaml").write_text(text.replace("healthy.py", str(elsewhere)))
    assert_refused(verify(), f"its task {elsewhere} is not next to it")


# Where things are written


@pytest.mark.parametrize(
    "output",
    ["healthy.py/plan.yaml", "tasks", "healthy.py", "space.yaml", ".autotune/healthy.db", "pipe", "loop", "x" * 300],
)
def test_an_output_that_cannot_be_written_is_told_before_anything_runs(output, folder, search):
    (folder / "tasks").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    task = (folder / "healthy.py").read_text()
    ended = search("healthy.py", "--output", output)
    assert (folder / "healthy.py").read_text() == task
    assert_refused(ended, output, "Choose another path with -o.")
    assert not (folder / ".autotune").exists()


@pytest.mark.medium
def test_a_full_disk_loses_nothing(folder):
    """The plan that was there stays whole, and the message names the disk."""
    before = Plan.from_yaml("schema: autotune/plan@1\nsettings:\n  batch: {micro: 1}\n")
    before.save(folder / "plan.yaml")
    (folder / "full").mkdir()
    script = (
        f"mount -t tmpfs -o size=16k none {folder}/full && cp plan.yaml space.yaml full/ && cd full\n"
        "dd if=/dev/zero of=filler bs=4k 2>/dev/null\n"
        f"{' '.join(PROGRAM)} search ../healthy.py {' '.join(QUICK)}\n"
        "code=$?; cat plan.yaml; exit $code"
    )
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script]
    if shutil.which("unshare") is None or subprocess.run([*command[:3], "true"], capture_output=True).returncode:
        pytest.skip("this system lets nobody mount a small disk of their own")
    ended = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=600)
    assert ended.returncode == 2, ended.stderr
    assert "No space left on device" in ended.stderr or "full" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert Plan.from_yaml(ended.stdout) == before


# Ctrl-C


@pytest.mark.slow
def test_ctrl_c_finishes_the_running_trial_and_writes_the_best_so_far(folder):
    """Quick, however busy the machine is. What processes of the task's leave behind is ended, too."""
    pids = folder / "pids"
    running = start(
        "search", "hostile_leaves_processes.py", *QUICK, "--trials", "20", cwd=folder, AUTOTUNE_TEST_PIDS=str(pids)
    )
    running.read_until("trial 1 starts")
    running.process.send_signal(signal.SIGINT)
    ended = running.finish()
    assert (ended.returncode, ended.stdout, ended.left_behind) == (130, "plan.yaml\n", []), ended.stderr
    assert "Ctrl-C again stops at once" in ended.stderr
    assert len(pids.read_text().split()) >= 6  # two for each process that built the model
    record = load_plan(folder / "plan.yaml").search
    assert record is not None
    assert (record.stopped, record.trials) == ("interrupted", 2)


def hanging(folder: Path, words: str = "trial 1 starts") -> Running:
    """A search whose job hangs once it has said these words: its first trial after the reference, if nothing else."""
    hang = folder / "hang"
    (folder / "hangs.py").write_text(
        "import threading, pathlib, healthy\nfrom healthy import *\n"
        "def compute_loss(model, batch):\n"
        f"    if pathlib.Path({str(hang)!r}).exists():\n        threading.Event().wait()\n"
        "    return healthy.compute_loss(model, batch)\n"
    )
    running = start("search", "hangs.py", *QUICK, "--trials", "20", cwd=folder)
    running.read_until(words)
    hang.touch()
    return running


@pytest.mark.medium
def test_ctrl_c_before_anything_was_measured_writes_nothing_and_keeps_the_study(folder):
    running = hanging(folder, "study hangs-1: ")
    running.process.send_signal(signal.SIGINT)
    running.read_until("Ctrl-C again stops at once")  # two at once may arrive as one
    running.process.send_signal(signal.SIGINT)
    ended = running.finish()
    assert (ended.returncode, ended.stdout, ended.left_behind) == (130, "", [])
    assert "--resume" in ended.stderr


@pytest.mark.slow
def test_ctrl_c_twice_ends_a_trial_that_hangs_and_until_then_nobody_else_gets_the_study(folder, search):
    running = hanging(folder)
    second = search("healthy.py", "--storage", "sqlite:///.autotune/hangs.db")
    running.process.send_signal(signal.SIGINT)
    running.read_until("Ctrl-C again stops at once")  # two signals that are pending at once are one
    running.process.send_signal(signal.SIGINT)
    ended = running.finish()
    assert (ended.returncode, ended.stdout, ended.left_behind) == (130, "plan.yaml\n", [])
    assert "timed out" not in ended.stderr  # it would have been ended at its deadline
    assert_refused(second, str(running.process.pid))


# Studies


@pytest.mark.medium
def test_a_study_file_that_is_corrupt_is_left_as_it_is(folder, search):
    (folder / ".autotune").mkdir()
    study = folder / ".autotune" / "healthy.db"
    study.write_bytes(b"no database at all " * 100)
    assert_refused(search("healthy.py"), "healthy.db")
    assert study.read_bytes() == b"no database at all " * 100


@pytest.mark.medium
def test_a_study_file_that_another_program_has_locked(folder, search):
    (folder / ".autotune").mkdir()
    study = sqlite3.connect(folder / ".autotune" / "healthy.db")
    study.execute("create table kept (x)")
    study.execute("begin exclusive")
    ended = search("healthy.py")
    study.rollback()
    assert_refused(ended, "healthy.db", "lock")


# Paths


LONG = "x" * 5000
PATHS = {
    "task": ("search", f"{LONG}.py", *QUICK),
    "output": ("search", "healthy.py", *QUICK, "-o", LONG),
    "space": ("search", "healthy.py", *QUICK, "--space", LONG),
    "storage": ("search", "healthy.py", *QUICK, "--storage", f"sqlite:///{LONG}"),
    "measurements": ("search", "healthy.py", *QUICK, "--measurements", f"sqlite:///{LONG}"),
    "plan": ("show", LONG),
    "task of a plan": ("verify", "plan.yaml", f"{LONG}.py", "--executor", "local"),
    "profile": ("profile", f"{LONG}.py"),
    "estimate": ("estimate", f"{LONG}.py"),
}


@pytest.mark.parametrize("command", PATHS.values(), ids=PATHS)
def test_a_path_that_is_too_long_is_said_before_anything_runs(command, folder, here):
    (folder / "plan.yaml").write_text("schema: autotune/plan@1\nsettings: {}\n")
    before = sorted(os.listdir(folder))
    ended = here(*command, cwd=folder)
    assert_refused(ended, "File name too long")
    assert "parameters, " not in ended.stderr
    assert sorted(os.listdir(folder)) == before


def test_a_task_whose_name_is_no_text_is_refused(folder, search):
    """Bytes that are no UTF-8 can stand neither in a plan nor in a study."""
    name = os.fsdecode(b"m\xff.py")
    shutil.copy(folder / "healthy.py", folder / name)
    assert_refused(search(name), "a name in UTF-8 was expected", "Rename the file.")


@pytest.mark.medium
def test_a_password_in_a_storage_is_not_printed(folder, search):
    ended = search("healthy.py", "--storage", "postgresql://user:hunter2@127.0.0.1:1/none")
    assert_refused(ended, "postgresql://user:***@127.0.0.1:1/none")
    assert "hunter2" not in ended.stderr


@pytest.mark.medium
def test_a_sum_over_no_count_is_refused(folder, search):
    loss = "def compute_loss(model, batch):\n    return nn.functional.mse_loss(model(batch[0]), batch[1]), 0\n"
    (folder / "uncounted.py").write_text(f"from healthy import *\nfrom torch import nn\n\n\n{loss}")
    assert_refused(search("uncounted.py"), "compute_loss returned (loss_sum, count)", "Wanted: the number of")
