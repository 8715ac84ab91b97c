"""``search --inference`` of task files through the command line: a plan, and bad input."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Ended

import autotune
from autotune.plan import load_plan

pytestmark = pytest.mark.slow

PIECES = """
import torch
from torch import nn
def build_model():
    return nn.Sequential(nn.Linear(256, 256), nn.Dropout(0.5))
def build_dataset():
    return torch.utils.data.TensorDataset(torch.randn(64, 256))
"""
INFER = "def infer(model, batch):\n    return {'logits': model(batch[0])}\n"
QUICK = ("--executor", "local", "--device", "cpu", "--trials", "2", "--trial-time", "0.2s", "--space", "space.yaml")


@pytest.fixture
def search(here: Callable[..., Ended], tmp_path: Path) -> Callable[..., Ended]:
    """A search of a task file of this text."""
    (tmp_path / "space.yaml").write_text("schema: autotune/space@1\nquantization: auto\n")

    def run(text: str, *options: str) -> Ended:
        (tmp_path / "model.py").write_text(PIECES + text)
        return here("search", "model.py", "--inference", *QUICK, *options, cwd=tmp_path)

    return run


def test_a_plan_of_a_task_that_only_infers(search, tmp_path, monkeypatch):
    ended = search(INFER, "--max-latency", "60s", "--max-time", "120s")
    assert ended.returncode == 0, ended.stderr
    monkeypatch.chdir(tmp_path)
    plan = load_plan("plan.yaml")
    assert plan.inference is not None
    assert plan.budget.latency_s == 60.0
    assert plan.measured is not None
    assert plan.measured.latency is not None
    assert plan.measured.peak.phases == {}
    inference = autotune.apply(plan, autotune.load_task("model.py", inference=True))
    assert [tuple(inference.infer(batch)["logits"].shape) for batch in inference.loader] == [(32, 256)] * 2


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("", (), "missing infer. A task file defines:"),
        ("infer = 3\n", (), "infer must be a function, but got int"),
        ("def infer(model, batch):\n    raise ValueError('no such thing')\n", (), "ValueError: no such thing"),
        ("def infer(model, batch):\n    return 'words'\n", (), "infer returned no tensor, but str"),
        (INFER, ("--budget", "20MiB"), "no configuration can stay within the budget"),
    ],
)
def test_bad_input_ends_with_2_in_words(search, text, options, said):
    ended = search(text, *options)
    assert ended.returncode == 2, ended.stderr
    assert said in " ".join(ended.stderr.split())
    assert "autotune/cli/" not in ended.stderr
    assert not os.path.exists("plan.yaml")


@pytest.mark.parametrize("latency", ["0", "-5ms", "soon"])
def test_a_latency_that_is_none(search, latency):
    ended = search(INFER, f"--max-latency={latency}")
    assert ended.returncode == 2
    assert f"not a duration: '{latency}'" in " ".join(ended.stderr.split())
