"""A script as a trial: measured and ended from outside; what keeps it from being measured is an outcome of its own."""

from __future__ import annotations

import functools
import os
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
import torch

from autotune.errors import UserError
from autotune.measure import InspectOptions, MeasureOptions
from autotune.measure.processes import read
from autotune.plan import Plan
from autotune.script import scratch
from autotune.script.changes import Changes
from autotune.script.command import filled, own_batch, placeholders, script_name, under_launcher
from autotune.searches.requests import failure
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.optimizers.optimizer import Optimizer
from autotune.workers import (
    STOPPED,
    Crashed,
    Failed,
    Inspected,
    InspectRequest,
    Lost,
    Measured,
    MeasureRequest,
    NonFinite,
    TimedOut,
)
from autotune.workers.local import LocalExecutor

SCRIPTS = Path(__file__).parents[1] / "scripts"
PYTHON = sys.executable
ENDLESS = (PYTHON, str(SCRIPTS / "mlp.py"), "--steps=100000000")


def requested(command, deadline_s=600.0, scratch="auto", **settings):
    return MeasureRequest(
        scratch=scratch,
        id="trial",
        task="script.py",
        command=tuple(under_launcher(command)),
        device="cpu",
        plan=Plan(settings=Settings(**settings)),
        options=MeasureOptions(trial_time_s=1.0, parity_batch=None),
        deadline_s=deadline_s,
    )


def measured(executor, command, **options):
    return executor.submit(requested(command, **options)).result()


def write_script(folder, body):
    path = folder / "script.py"
    path.write_text(
        "import os, torch\nfrom torch import nn\nmodel = nn.Linear(4, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nx = torch.randn(8, 4)\n"
        "def step():\n    model(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()\n" + body
    )
    return (PYTHON, str(path))


@pytest.fixture
def script(tmp_path):
    """A command for a script of these lines, behind a model, an optimizer and a batch."""

    return functools.partial(write_script, tmp_path)


@pytest.mark.slow
def test_a_script_is_measured_with_a_plan_in_force_and_ended(local_executor):
    outcome = measured(
        local_executor, (*ENDLESS, "--batch-size=8", "--grad-accum=2"), batch=Batch(micro=8, accumulate=2)
    )
    assert isinstance(outcome, Measured), outcome
    found = outcome.measurement
    assert found.num_windows >= 3
    assert found.samples_per_s.value > 0
    assert found.peak.process > 50 * 2**20
    assert outcome.output.count("loss ") >= found.num_steps


@pytest.mark.slow
def test_facts_come_from_the_scripts_first_steps(local_executor):
    command = (*ENDLESS, "--batch-size=8", "--grad-accum=4")
    request = InspectRequest(
        id="inspect", task="mlp.py", command=tuple(under_launcher(command)), device="cpu", options=InspectOptions()
    )
    outcome = local_executor.submit(request).result()
    assert isinstance(outcome, Inspected), outcome
    facts = outcome.facts
    assert (facts.effective_batch, facts.micro_batch, facts.effective_batch_held) == (32, 8, True)
    assert facts.num_parameters == 12 * 32 + 32 + 32 * 32 + 32 + 32 * 4 + 4
    assert (facts.dataset_length, facts.dataset_kind, facts.dataset_deterministic) == (256, "map", True)
    assert facts.optimizer == "AdamW"
    of_models, of_optimizers = (
        {"variant", "pruning", "low_rank", "frozen_weights", "quantization", "reversible"},
        {"optimizer_step", "sparse_gradients", "lazy_adam", "trained_weights"},
    )
    assert facts.left_out.keys() == {*of_models, *of_optimizers, "parallel"}


BAD = {
    "ends before its windows do": ("step(); step()\n", Failed, "the script ended before it could be measured"),
    "makes no step": ("print(1)\n", Failed, "the script ended without an optimizer step in this process"),
    "raises": ("step()\nraise RuntimeError('no more data')\n", Failed, "RuntimeError: no more data"),
    "os._exit": ("step()\nos._exit(0)\n", Crashed, "exited with code 0 and without an answer while training"),
    "a parser that refuses": (
        "import sys\nsys.exit('unrecognized arguments: --x')\n",
        Failed,
        "unrecognized arguments: --x",
    ),
    "a parser that refuses a value": (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--x', type=int, choices=[1])\n"
        "parser.parse_args(['--x', '2'])\n",
        Failed,
        "sys.exit(2)",
    ),
    "asks for input": ("input('name: ')\n", Failed, "EOF when reading a line. A script has no standard input here"),
    "a loss that is none": ("x = x * float('nan')\nwhile True: step()\n", NonFinite, "nan"),
    "a GAN": (
        "critic = nn.Linear(2, 1)\ntheirs = torch.optim.SGD(critic.parameters(), lr=0.1)\n"
        "while True:\n    critic(model(x)).sum().backward(); optimizer.step(); theirs.step()\n",
        Failed,
        "Name them: `autotune.prepare(model, optimizer, loader)`, with None for the loader where there is none",
    ),
    "processes of its own": (
        "import torch.multiprocessing as mp\nif __name__ == '__main__':\n    mp.spawn(print, nprocs=2)\n",
        Failed,
        "the script starts its processes itself (torch.multiprocessing.spawn)",
    ),
    "a process that it forks": (
        "import multiprocessing as mp\ndef train():\n    while True: step()\n"
        "one = mp.get_context('fork').Process(target=train)\none.start(); one.join()\n",
        Failed,
        "the script trains in a process that it has forked",
    ),
    "a process that it starts anew": (
        "import multiprocessing as mp\nif __name__ == '__main__':\n"
        "    one = mp.get_context('spawn').Process(target=print)\n    one.start(); one.join()\n",
        Failed,
        "ended without an optimizer step in this process",
    ),
    "what a plan cannot change": (
        "optimizer = torch.optim.LBFGS(model.parameters())\nmodel(x).sum().backward()\noptimizer.step(lambda: 0.0)\n",
        Failed,
        "LBFGS supports no choice",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", BAD)
def test_a_script_that_cannot_be_measured_says_why(what, local_executor, script):
    body, kind, reason = BAD[what]
    outcome = measured(local_executor, script(body), optimizer=Optimizer(kind="foreach"))
    assert isinstance(outcome, kind), outcome
    assert reason in f"{outcome.message}"
    if what == "a parser that refuses a value":
        assert "argument --x: invalid choice: 2" in failure(outcome)


@pytest.mark.slow
def test_what_a_trial_may_not_download_is_told_with_what_to_do(local_executor, script):
    body = "from huggingface_hub import hf_hub_download\nhf_hub_download('nobody/nothing', 'config.json')\n"
    request = requested(script(body)).model_copy(update={"environment": {"HF_HUB_OFFLINE": "1"}})
    outcome = local_executor.submit(request).result()
    assert isinstance(outcome, Failed), outcome
    assert "Trials are offline (HF_HUB_OFFLINE=1)" in outcome.message
    assert "or search with HF_HUB_OFFLINE=0" in outcome.message


@pytest.mark.medium
@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use a GPU here")
def test_a_script_for_a_gpu_that_torch_cannot_use_is_lost(local_executor, tmp_path):
    """It says nothing of the configuration. (A script that hides the GPU by itself: tests/card.)"""
    (tmp_path / "script.py").write_text(
        "import sys\nassert 'torch' not in sys.modules, 'variables would be set too late'\nimport torch\n"
    )
    request = requested((PYTHON, str(tmp_path / "script.py"))).model_copy(update={"device": "cuda"})
    outcome = local_executor.submit(request).result()
    assert isinstance(outcome, Lost), outcome
    assert "torch cannot use the GPU: " in outcome.message


@pytest.mark.slow
def test_a_script_without_an_optimizer_step_ends_at_its_deadline(local_executor, tmp_path):
    """And what it was doing is said, by its own line."""
    path = tmp_path / "script.py"
    path.write_text("import time\nprint('busy', flush=True)\ntime.sleep(600)\n")
    for deadline_s in (8.0, 32.0, 128.0):  # on a busy machine Python comes to the script later
        outcome = measured(local_executor, (PYTHON, str(path)), deadline_s=deadline_s)
        assert isinstance(outcome, TimedOut)
        if outcome.output:
            break
    assert "up to its first optimizer step" in outcome.message
    assert "script.py" in outcome.message
    assert outcome.output == "busy\n"


@pytest.mark.slow
def test_a_script_that_will_not_end_is_ended(local_executor, script):
    """It catches what ends it, and goes on."""
    body = "while True:\n    try:\n        step()\n    except BaseException:\n        pass\n"
    assert isinstance(measured(local_executor, script(body)), Measured)


def test_the_launcher_stands_between_python_and_the_script():
    start = ["-P", "-m", "autotune.script", "--add-path"]
    python = [PYTHON, "-u", "-W", "ignore"]
    assert under_launcher([*python, "train.py", "-m", "1"]) == [*python, *start, "train.py", "-m", "1"]
    assert under_launcher(["nice", PYTHON, "-m", "package", "x"]) == ["nice", PYTHON, *start, "-m", "package", "x"]
    assert under_launcher([PYTHON, "-c", "pass"]) is None
    assert under_launcher(["./train.sh"]) is None
    assert script_name([PYTHON, "-m", "package.train", "--x"]) == "package.train"
    assert script_name([PYTHON, "src/train.py", "--x"]) == "src/train.py"


@pytest.mark.medium
@pytest.mark.parametrize(
    "command",
    [
        ["deepspeed", "--num_gpus=2", "train.py"],
        ["mpirun", "-n", "2", "python", "train.py"],
        [PYTHON, "-m", "deepspeed.launcher.runner", "x.py"],
        ["fabric", "run", "train.py"],
    ],
)
def test_launchers_of_several_processes_are_refused(command):
    with pytest.raises(UserError, match="starts several processes"):
        under_launcher(command)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("before", "flag"),
    [
        (["torchrun", "--nproc-per-node", "2"], "--no-python"),
        ([PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], "--no-python"),
        (["accelerate", "launch", "--cpu"], "--no_python"),
        (["env", "A=b", "torchrun", "--nproc-per-node", "2"], "--no-python"),
        (["numactl", "-N", "0", "accelerate", "launch"], "--no_python"),
    ],
)
def test_each_process_of_a_launcher_runs_under_ours(before, flag):
    """A script and a module alike; what they are told stays behind them."""
    for script in (["train.py", "--x", "2"], ["-m", "package.train", "y.py"]):
        launched = under_launcher([*before, *script])
        assert launched[: len(before) + 1] == [*before, flag]
        assert launched[len(before) + 2 :] == ["-u", "-P", "-m", "autotune.script", "--add-path", *script]
    with pytest.raises(UserError, match="no script was found behind"):
        under_launcher([*before, "./train.sh"])


def test_files_that_trials_changed_are_told_once(tmp_path):
    (tmp_path / "kept").write_text("1")
    (tmp_path / "changed").write_text("1")
    changes = Changes(tmp_path, tmp_path / "plan.yaml")
    assert changes.told() is None
    (tmp_path / "changed").write_text("22")
    (tmp_path / "plan.yaml").write_text("our own")
    assert "write files here: changed. With --scratch copy " in changes.told()
    assert changes.told() is None


WATCHES = """
import sys, time
from pathlib import Path
from autotune.script.changes import Changes
while not Path("search.log").exists():
    time.sleep(0.01)
changes = Changes(Path.cwd(), Path("plan.yaml"), Path("events.jsonl"))
for name in ("plan.yaml", "events.jsonl", "model.pt"):
    Path(name).write_text("")
print("goes on", flush=True)
print("fails", file=sys.stderr, flush=True)
Path("told").write_text(changes.told())
"""


@pytest.mark.parametrize(
    "shell", ["{} > search.log 2>&1", "{} | tee search.log", "({}; sleep 0) 2> errors.log > search.log"]
)
def test_what_the_commands_own_output_goes_to_is_none_of_the_scripts(shell, tmp_path):
    command = shlex.join([sys.executable, "-c", WATCHES])
    subprocess.run(["bash", "-c", shell.format(command)], cwd=tmp_path, check=True, stdin=subprocess.DEVNULL)
    assert "goes on" in (tmp_path / "search.log").read_text()
    assert "write files here: model.pt. With" in (tmp_path / "told").read_text()


def test_placeholders_are_the_only_source_of_the_batch():
    command = [
        "python",
        "train.py",
        "--b={batch.micro=32}",
        "--json",
        '{"a": {"b.c": 1}}',
        "--acc",
        "{batch.accumulate}",
    ]
    assert placeholders(command) == {"batch.micro", "batch.accumulate"}
    assert own_batch(command) == Batch(micro=32)
    assert filled(command, Batch(micro=8, accumulate=4)) == [*command[:2], "--b=8", *command[3:5], "--acc", "4"]
    assert filled(["python", "x.py"], Batch(micro=8)) == ["python", "x.py"]
    with pytest.raises(UserError, match="what does the job train with today"):
        own_batch(["python", "x.py", "{batch.micro}"])
    with pytest.raises(UserError, match="Everything else is applied without a flag"):
        placeholders(["python", "x.py", "--dtype={precision.kind}"])
    with pytest.raises(UserError, match="last micro-batch is smaller"):
        filled(command, Batch(micro=5, accumulate=2, effective=8))


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A folder with a checkpoint, linked data, an environment and a repository, which is the current one."""
    folder, elsewhere = tmp_path / "job", tmp_path / "elsewhere"
    for one in (folder / "runs", folder / "venv", folder / ".git", elsewhere):
        one.mkdir(parents=True)
    (folder / "runs" / "ckpt.pt").write_text("the user's")
    (folder / "venv" / "pyvenv.cfg").write_text("")
    (elsewhere / "data").write_text("data")
    (folder / "data").symlink_to("../elsewhere/data")
    monkeypatch.chdir(folder)
    return folder


def test_a_copy_of_the_folder_takes_what_is_written(job, tmp_path):
    scratch.work_in(tmp_path / "scratch", "copy")
    Path("runs/ckpt.pt").write_text("a trial's")
    assert (job / "runs" / "ckpt.pt").read_text() == "the user's"
    assert Path("data").read_text() == "data"
    assert Path("venv").is_symlink()
    assert not Path(".git").exists()


def test_a_folder_of_more_than_can_be_copied_is_refused(job, tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "_MOST_BYTES", 3)
    monkeypatch.setattr(scratch, "_share", lambda source, copy: False)
    with pytest.raises(UserError, match="Put large data elsewhere"):
        scratch.work_in(tmp_path / "scratch", "copy")


@pytest.mark.slow
def test_in_an_empty_folder_the_script_is_the_users(job, tmp_path, local_executor):
    """And it is seeded as in every other trial."""
    say = "import numpy, random\nprint(random.random(), numpy.random.random(), torch.initial_seed())\n"
    command = write_script(job, f"{say}print(os.getcwd(), os.listdir())\nwhile True: step()\n")
    scratch.work_in(tmp_path / "scratch", "empty")
    assert scratch.found_from("script.py", str(job)) == str(job / "script.py")
    assert scratch.found_from(str(job / "script.py"), str(job)) == str(job / "script.py")
    outcome = measured(local_executor, command, scratch="empty")
    assert isinstance(outcome, Measured), outcome
    expected = f"{random.Random(0).random()} {numpy.random.RandomState(0).random_sample()} 0"
    said = outcome.output.splitlines()
    assert said[0] == expected
    assert said[1].endswith("/scratch []")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "left"), [("auto", "the user's"), ("off", "a trial's")])
def test_a_trial_overwrites_no_file_of_a_small_folder_unless_it_is_asked_to(job, kind, left):
    command = write_script(job, "open('runs/ckpt.pt', 'w').write(\"a trial's\")\nwhile True: step()\n")
    with LocalExecutor() as executor:
        outcome = measured(executor, command, scratch=kind)
    assert isinstance(outcome, Measured), outcome
    assert Path("runs/ckpt.pt").read_text() == left


@pytest.mark.medium
@pytest.mark.parametrize("limit", ["_SMALL_ENTRIES", "_SMALL_BYTES"])
def test_a_folder_that_is_not_small_is_worked_in_and_never_copied_unasked(job, tmp_path, monkeypatch, limit):
    """All processes of a trial find it."""
    monkeypatch.setattr(scratch, limit, 1)
    for is_first in (True, False):
        assert (
            scratch.work_in(tmp_path / "scratch", "auto", is_first)
            == "the script's folder is too large to be copied, or cannot be read"
        )
        assert Path.cwd() == job
    assert scratch.made_in(tmp_path / "scratch") == {}
    assert scratch.work_in(tmp_path / "other", "copy") is None
    assert Path.cwd() != job


def test_a_copy_keeps_the_times_and_modes_of_files(job, tmp_path):
    (job / "run.sh").write_text("")
    (job / "run.sh").chmod(0o755)
    os.utime(job / "run.sh", (1e9, 1e9))
    scratch.work_in(tmp_path / "scratch", "copy")
    found = Path("run.sh").stat()
    assert (found.st_mtime, found.st_mode & 0o777) == (1e9, 0o755)


@pytest.mark.slow
def test_what_each_trial_would_make_anew_is_told(job):
    """A dataset that the script downloads beside it; the checkpoint of an epoch is made after the first step."""
    body = (
        "os.makedirs('../cache/digits')\nopen('../cache/digits/x.npy', 'wb').write(bytes(5 * 2**20))\n"
        "while True:\n    step()\n    open('epoch.pt', 'wb').write(bytes(9 * 2**20))\n"
    )
    request = InspectRequest(
        id="look",
        task="script.py",
        command=tuple(under_launcher(write_script(job, body))),
        device="cpu",
        options=InspectOptions(),
        deadline_s=60.0,
    )
    with LocalExecutor() as executor:
        (said,) = executor.submit(request).result().facts.warnings
    assert f"makes 5 MiB of files ({job.parent}/cache/digits/x.npy). Each trial makes them anew" in said
    assert not (job.parent / "cache").exists()


@pytest.mark.slow
def test_what_a_script_starts_does_not_outlive_its_trial(local_executor, script):
    """It takes no signal, starts a process, makes a daemon, and forks: both halves train, and one is measured."""
    body = (
        "import signal, subprocess, sys, time\n"
        "for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):\n    signal.signal(number, signal.SIG_IGN)\n"
        "def tell(pid): os.write(1, f'started {pid}\\n'.encode())  # at once: several processes write\n"
        "tell(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        tell(os.getpid())\n        time.sleep(600)\n    os._exit(0)\n"
        "if (child := os.fork()) != 0:\n    tell(child)\n"
        "while True: step()\n"
    )
    outcome = measured(local_executor, script(body))
    assert isinstance(outcome, Measured), outcome
    started = [line.split()[1] for line in outcome.output.splitlines() if line.startswith("started")]
    assert len(started) == 3
    assert [pid for pid in started if Path("/proc", pid).exists()] == []


@pytest.mark.slow
def test_a_script_that_takes_no_signals_ends_once_its_search_does(script):
    """As on a second Ctrl-C, or some seconds after SIGTERM: nothing is asked of the script."""
    body = (
        "import pathlib, signal, time\n"
        "for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):\n    signal.signal(number, signal.SIG_IGN)\n"
        "pathlib.Path(__file__).with_name('pid').write_text(str(os.getpid()))\n"
        "while True:\n    try:\n        step()\n        time.sleep(600)\n    except BaseException:\n"
        "        pathlib.Path(__file__).with_name('asked').touch()\n"
    )
    command = script(body)
    told = Path(command[-1]).with_name("pid")
    with LocalExecutor() as executor:
        future = executor.submit(requested(command))
        while not told.exists() or not told.read_text():
            time.sleep(0.02)
    assert future.result() == STOPPED
    assert not told.with_name("asked").exists()
    assert not read(Path("/proc", told.read_text(), "cmdline"))  # what was killed has a pid until it is waited for
