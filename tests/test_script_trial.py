"""A script as a trial: measured and ended from outside; what keeps it from being measured is an outcome of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.measure import InspectOptions, MeasureOptions
from autotune.plan import Plan
from autotune.script.changes import changed_since, snapshot
from autotune.script.command import filled, own_batch, placeholders, script_name, under_launcher
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.optimizer import Optimizer
from autotune.workers import Crashed, Failed, Inspected, InspectRequest, Measured, MeasureRequest, NonFinite, TimedOut

SCRIPTS = Path(__file__).with_name("scripts")
PYTHON = sys.executable
ENDLESS = (PYTHON, str(SCRIPTS / "mlp.py"), "--steps=100000000")


def measured(executor, command, deadline_s=120.0, **settings):
    request = MeasureRequest(
        id="trial",
        task="script.py",
        command=tuple(under_launcher(command)),
        device="cpu",
        plan=Plan(settings=Settings(**settings)),
        options=MeasureOptions(trial_time_s=1.0, parity_batch=None),
        deadline_s=deadline_s,
    )
    return executor.submit(request).result()


@pytest.fixture
def script(tmp_path):
    """A command for a script of these lines, behind a model, an optimizer and a batch."""

    def write(body):
        path = tmp_path / "script.py"
        path.write_text(
            "import os, torch\nfrom torch import nn\nmodel = nn.Linear(4, 2)\n"
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nx = torch.randn(8, 4)\n"
            "def step():\n    model(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()\n" + body
        )
        return (PYTHON, str(path))

    return write


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
    assert facts.left_out.keys() == {"pruning", "optimizer_step"}


BAD = {
    "ends before its windows do": ("step(); step()\n", Failed, "the script ended before it could be measured"),
    "raises": ("step()\nraise RuntimeError('no more data')\n", Failed, "RuntimeError: no more data"),
    "os._exit": ("step()\nos._exit(0)\n", Crashed, "exited with code 0 and without an answer while training"),
    "a parser that refuses": (
        "import sys\nsys.exit('unrecognized arguments: --x')\n",
        Failed,
        "unrecognized arguments: --x",
    ),
    "a loss that is none": ("x = x * float('nan')\nwhile True: step()\n", NonFinite, "nan"),
    "what a plan cannot change": (
        "optimizer = torch.optim.LBFGS(model.parameters())\nmodel(x).sum().backward()\noptimizer.step(lambda: 0.0)\n",
        Failed,
        "LBFGS supports no choice",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_script_that_cannot_be_measured_says_why(what, local_executor, script):
    body, kind, reason = BAD[what]
    outcome = measured(local_executor, script(body), optimizer=Optimizer(kind="foreach"))
    assert isinstance(outcome, kind), outcome
    assert reason in f"{outcome.message}"


def test_a_script_without_an_optimizer_step_ends_at_its_deadline(local_executor, script):
    """And what it was doing is said, by its own line."""
    outcome = measured(
        local_executor, script("import time\nprint('busy', flush=True)\ntime.sleep(600)\n"), deadline_s=15.0
    )
    assert isinstance(outcome, TimedOut)
    assert "up to its first optimizer step" in outcome.message
    assert "script.py" in outcome.message
    assert outcome.output == "busy\n"


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


@pytest.mark.parametrize(
    "command",
    [
        ["torchrun", "--nproc-per-node=2", "train.py"],
        ["accelerate", "launch", "x.py"],
        [PYTHON, "-m", "torch.distributed.run"],
    ],
)
def test_launchers_of_several_processes_are_refused(command):
    with pytest.raises(UserError, match="starts several processes"):
        under_launcher(command)


@pytest.mark.parametrize(
    ("before", "flag"),
    [
        (["torchrun", "--nproc-per-node", "2"], "--no-python"),
        ([PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], "--no-python"),
        (["accelerate", "launch", "--cpu"], "--no_python"),
    ],
)
def test_each_process_of_a_launcher_runs_under_ours(before, flag):
    """A script and a module alike; what they are told stays behind them."""
    for script in (["train.py", "--x", "2"], ["-m", "package.train", "y.py"]):
        launched = under_launcher([*before, *script], may_be_several=True)
        assert launched[: len(before) + 1] == [*before, flag]
        assert launched[len(before) + 2 :] == ["-u", "-P", "-m", "autotune.script", "--add-path", *script]
    with pytest.raises(UserError, match="no script was found behind"):
        under_launcher([*before, "./train.sh"], may_be_several=True)


def test_files_that_trials_changed_are_told(tmp_path):
    (tmp_path / "kept").write_text("1")
    (tmp_path / "changed").write_text("1")
    before = snapshot(tmp_path)
    (tmp_path / "changed").write_text("22")
    (tmp_path / "plan.yaml").write_text("our own")
    assert "measured: changed. " in changed_since(before, tmp_path, tmp_path / "plan.yaml")
    assert changed_since(snapshot(tmp_path), tmp_path, tmp_path / "plan.yaml") is None


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
