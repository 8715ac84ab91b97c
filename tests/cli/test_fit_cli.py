"""``autotune fit``: a plan that is predicted to fit, through the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Ended
from screen import printed

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
        (("--budget", "8GiB", "--output", "deep.py"), "that is the task itself"),
    ],
)
def test_what_is_wrong_is_said(options, words, fit):
    ended = fit(*options)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert words in ended.stderr
