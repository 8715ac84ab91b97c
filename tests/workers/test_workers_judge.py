"""A judge request, answered by a process: what it finds comes back, and what a killed one kept is gone on from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.measure.cuts.types import GroupRow, JudgeOptions
from autotune.measure.measurement import QualityOptions
from autotune.plan import Plan
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.models.pruning import Pruning
from autotune.workers import Crashed, CutsJudged, Failed, InspectRequest, JudgeRequest

TASK = """
import os, signal, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset

batch_size = 16
CALLS, DIED, KEPT = (Path(__file__).with_name(name) for name in ("calls", "died", "cuts.json"))

def build_model():
    return nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))

def build_dataset():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))

def compute_loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])

def evaluate(model):
    return -compute_loss(model, build_dataset().tensors).item()
"""
DIES_JUDGING = """
judge = evaluate

def evaluate(model):
    number = len(CALLS.read_text()) if CALLS.exists() else 0
    CALLS.write_text("." * (number + 1))
    if number == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return judge(model)
"""
DIES_SCANNING = """
lose = compute_loss

def compute_loss(model, batch):
    if not DIED.exists() and KEPT.exists() and '"groups"' in KEPT.read_text():
        DIED.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return lose(model, batch)
"""
REFERENCE = Settings(batch=Batch(micro=16))


def judging(folder: Path, more: str = "", **changes: object) -> JudgeRequest:
    """Of half the widths, by a task that ends so."""
    (folder / "model.py").write_text(TASK + more)
    options = {
        "recovery": QualityOptions(num_samples=64),
        "seeds": (0, 1),
        "candidates": (REFERENCE.having(Pruning(kind="structured", ratio=0.5)),),
        "keep": str(folder / "cuts.json"),
    }
    return JudgeRequest(
        id="cuts",
        task=str(folder / "model.py"),
        device="cpu",
        plan=Plan(settings=REFERENCE),
        options=JudgeOptions(**{**options, **changes}),
    )


@pytest.mark.medium
def test_a_killed_process_is_gone_on_from(local_executor, tmp_path: Path):
    """One evaluation for each seed of the reference and of the cut, and one of the reference after a quarter: the fifth
    kills the process, which is the cut's from its second seed. The other process makes that one again."""
    request = judging(tmp_path, DIES_JUDGING)
    assert isinstance(local_executor.ask(request), Crashed)
    outcome = local_executor.ask(request)
    assert isinstance(outcome, CutsJudged), outcome
    assert len((tmp_path / "calls").read_text()) == 5 + 1
    (cut,) = outcome.found.cuts
    assert len(cut.qualities) == 2
    assert "prune 50% of widths" in outcome.output


@pytest.mark.medium
def test_a_process_that_is_killed_as_it_scans_is_gone_on_from(local_executor, tmp_path: Path):
    """As it looks at the second of two groups. The other process takes the first as it is, with the time that it was
    measured to take, and comes to the end."""
    request = judging(tmp_path, DIES_SCANNING, allowed=100.0, targets=(0.7,), by_bytes=True, seeds=(0,))
    assert isinstance(local_executor.ask(request), Crashed)
    (first,) = json.loads((tmp_path / "cuts.json").read_text())["found"]["groups"]
    outcome = local_executor.ask(request)
    assert isinstance(outcome, CutsJudged), outcome
    assert outcome.found.groups[0] == GroupRow.model_validate(first)
    assert [group.first for group in outcome.found.groups] == ["0", "2"]
    assert outcome.found.notes == ()
    assert any(cut.qualities and cut.settings.pruning.ratios for cut in outcome.found.cuts)


OTHERS = "\ndef weights():\n    return {'0.weight': torch.ones(3, 8)}\n"
LEAVES = "\ndef evaluate(model):\n    sys.exit('no data')\n"


@pytest.mark.medium
def test_weights_of_another_model_are_refused_as_the_task_is_inspected_and_as_cuts_are_judged(local_executor, tmp_path):
    """In words, without a traceback."""
    request = judging(tmp_path, OTHERS)
    for asked in (InspectRequest(id="inspect", task=request.task, device="cpu"), request):
        outcome = local_executor.ask(asked)
        assert isinstance(outcome, Failed), outcome
        assert "they are another model's: 0.bias is missing" in outcome.message
        assert outcome.traceback == ""


@pytest.mark.medium
def test_an_evaluation_that_ends_the_process_is_said(local_executor, tmp_path):
    outcome = local_executor.ask(judging(tmp_path, LEAVES))
    assert isinstance(outcome, Failed), outcome
    assert "the task called sys.exit('no data')" in outcome.message
