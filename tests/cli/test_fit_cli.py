"""``autotune fit``: a plan that is predicted to fit, through the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Ended, autotune, environment
from screen import printed
from script_lines import TWICE

from autotune.plan import load_plan
from autotune.report.show import explain
from autotune.units import MIB

DEEP = """\
import torch
from torch import nn
batch_size = 2**15
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))
def build_model():
    return nn.Sequential(*(Block() for _ in range(6)))
def build_dataset():
    return torch.zeros(1, 64).expand(2**16, 64)
def compute_loss(model, x):
    return model(x).square().mean()
"""
"""Each block keeps its hidden layer of 32 MiB."""


@pytest.fixture
def fit(here: Callable[..., Ended], tmp_path: Path) -> Callable[..., Ended]:
    (tmp_path / "deep.py").write_text(DEEP)
    return lambda *options, task="deep.py": here("fit", task, *options, cwd=tmp_path)


@pytest.mark.medium
def test_it_writes_a_plan_that_says_it_is_predicted_and_applies(fit, tmp_path):
    """As it stands it takes 6 x 32 MiB of hidden layers and more beside a context of up to 768 MiB."""
    ended = fit("--device-memory", "1150MiB", "--json")
    assert ended.returncode == 0, ended.stderr
    plan = load_plan(tmp_path / "plan.yaml")
    assert json.loads(ended.stdout)["predicted"]["how"] == plan.predicted.how == "traced"
    assert (plan.measured, plan.budget.limit, plan.budget.device) == (None, 1150 * MIB, "cuda")
    assert plan.settings.batch.num_samples == 2**15
    assert plan.settings.checkpointing.kind == "chosen" or plan.settings.layers.kind == "exact"
    assert plan.predicted.high * 1.03 <= plan.budget.limit + MIB
    assert plan.predicted.reference > plan.predicted.process
    shown = " ".join(printed(explain(plan, tmp_path / "plan.yaml"), 120).split())
    assert "predicted, not measured, within 1150 MiB, on cuda" in shown
    assert "predicted peak" in shown


@pytest.mark.medium
def test_nothing_fits_exits_with_3_names_what_would_and_writes_nothing(fit, tmp_path):
    ended = fit("--device-memory", "800MiB")
    assert (ended.returncode, ended.stdout) == (3, "")
    assert "nothing fits within 800 MiB. The smallest budget that works is" in ended.stderr
    assert "what binds there is" in ended.stderr
    assert not (tmp_path / "plan.yaml").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--device", "cuda"), "Give --budget or --device-memory"),
        (("--card", "h100,l40s"), "a plan is for one card, but got 2"),
        (("--card", "unknown"), "--card: no card is known as 'unknown'."),
        (("--budget", "8GiB", "--scratch", "empty"), "--scratch is for a script."),
        (("--budget", "8GiB", "--output", "deep.py"), "that is the task itself"),
    ],
)
def test_what_is_wrong_is_said(options, words, fit):
    ended = fit(*options)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert words in ended.stderr


def test_a_script_in_a_tasks_place_is_told_how_it_is_given(fit, tmp_path):
    (tmp_path / "train.py").write_text("import torch\n")
    ended = fit("--budget", "8GiB", task="train.py")
    assert ended.returncode == 2
    assert "`autotune fit -- python train.py --its --flags`" in ended.stderr


@pytest.mark.medium
def test_techniques_are_checked_as_in_python(fit):
    ended = fit("--budget", "8GiB", "--techniques", "layers, data_loading")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "and not what is computed or fed to it, but got data_loading" in ended.stderr


HEAD = """\
import sys
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))
model = nn.Sequential(*(Block() for _ in range(6)))
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
loader = torch.utils.data.DataLoader(torch.zeros(1, 64).expand(2**16, 64), 2**15)
"""
LOOP = """
for _ in range(int(sys.argv[1])):
    for x in loader:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
"""


@pytest.fixture
def fit_script(here, tmp_path):
    """``fit`` of a script of these lines, told to train for so many epochs."""

    def run(body, *options, epochs=1000):
        (tmp_path / "train.py").write_text(HEAD + body)
        return here("fit", *options, "--scratch=off", "--", sys.executable, tmp_path / "train.py", epochs, cwd=tmp_path)

    return run


@pytest.mark.slow
def test_a_script_is_fitted_and_nothing_else_is_left(fit_script, tmp_path):
    """For a card of the size that the same model as a task needs; nothing but the plan is left in the folder."""
    ended = fit_script(LOOP, "--device-memory", "1150MiB")
    assert ended.returncode == 0, ended.stderr
    plan = load_plan(tmp_path / "plan.yaml")
    assert (plan.measured, plan.budget.device, plan.predicted.how) == (None, "cuda", "traced")
    assert (plan.settings.batch.num_samples, Path(plan.task.source).name) == (2**15, "train.py")
    assert plan.settings.checkpointing.kind == "chosen" or plan.settings.layers.kind == "exact"
    assert plan.predicted.reference > plan.predicted.process
    assert {path.name for path in tmp_path.iterdir()} == {"plan.yaml", "train.py"}


@pytest.mark.slow
def test_a_script_on_a_cpu_is_within_its_prediction(fit_script, tmp_path):
    """Loader, scheduler and all that it imports count as they do in the job."""
    ended = fit_script(LOOP, "--budget", "800MiB")
    assert ended.returncode == 0, ended.stderr
    predicted = load_plan(tmp_path / "plan.yaml").predicted
    job = [sys.executable, "-m", "autotune", "run", "plan.yaml", "--", sys.executable, "train.py", "2"]
    ran = subprocess.run(
        [sys.executable, "-c", PEAK, *job], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert "autotune: applied: " in ran.stderr, ran.stderr
    assert int(ran.stdout.splitlines()[-1]) * 1024 <= predicted.high


PEAK = """\
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
"""Runs a command, and prints the KiB that the largest of its processes took."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "options", "code", "words"),
    [
        (LOOP, ("--budget", "200MiB"), 3, "The smallest budget that works is"),
        ("raise ValueError('no data')", (), 2, "ValueError: no data"),
        ("model(next(iter(loader))).sum().backward()", (), 2, "without an optimizer step"),
        (TWICE + LOOP.replace("loss.b", "Twice.apply(loss).b"), (), 2, "its loss goes by what is not seen (Twice"),
    ],
)
def test_a_script_that_cannot_be_fitted_is_told_why(body, options, code, words, fit_script, tmp_path):
    ended = fit_script(body, *options)
    assert (ended.returncode, ended.stdout) == (code, ""), ended.stderr
    assert words in ended.stderr
    assert not (tmp_path / "plan.yaml").exists()


AWKWARD = """
import multiprocessing, subprocess
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with multiprocessing.get_context("fork").Pool(2) as pool:
    for line in range(100_000):
        print("line", line, "x" * 60)
    print(pool.map(abs, range(-9, 0)), file=sys.stderr)
    while True:
        try:
            train()
        except BaseException as error:
            print("goes on after", type(error).__name__, file=sys.stderr)
"""
ONE_STEP = """
def train():
    for x in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
SHARED = (
    """
torch.distributed.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(model)
"""
    + LOOP
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "launcher", "code", "words"),
    [
        (ONE_STEP + AWKWARD, (sys.executable,), 0, ""),
        (SHARED, (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"), 0, ""),
        (
            SHARED,
            (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            2,
            "the step of one process is traced, but the script trains in 2. Call `autotune.fit` in it",
        ),
    ],
    ids=["forks, prints much and catches all", "torchrun of one", "torchrun of two"],
)
def test_whatever_a_script_does_nothing_of_it_is_left(body, launcher, code, words, tmp_path):
    (tmp_path / "train.py").write_text(HEAD.replace("2**15", "2**8").replace("2**16", "2**10") + body)
    ended = autotune("fit", "--budget", "8GiB", "--scratch=off", "--", *launcher, "train.py", "1000", cwd=tmp_path)
    assert (ended.returncode, ended.left_behind) == (code, []), ended.stderr
    assert words in ended.stderr
    assert (tmp_path / "plan.yaml").exists() == (code == 0)
    assert "line 99" not in ended.stderr + ended.stdout
