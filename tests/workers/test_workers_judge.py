"""A judge request, answered by a process: what it finds comes back, and what a killed one kept is gone on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.measure.cuts.types import JudgeOptions
from autotune.measure.measurement import QualityOptions
from autotune.plan import Plan
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.pruning import Pruning
from autotune.workers import Crashed, CutsJudged, JudgeRequest

TASK = """
import os, signal
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset

batch_size = 16
CALLS = Path(__file__).with_name("calls")

def build_model():
    return nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 1))

def build_dataset():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))

def compute_loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])

def evaluate(model):
    number = len(CALLS.read_text()) if CALLS.exists() else 0
    CALLS.write_text("." * (number + 1))
    if number == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return -compute_loss(model, build_dataset().tensors).item()
"""


@pytest.mark.medium
def test_a_killed_process_is_gone_on_from(local_executor, tmp_path: Path):
    """Two evaluations for each seed of the reference and of the cut: the seventh kills the process, which is the
    cut's from its second seed. The other process makes that one again, and the one after it."""
    (tmp_path / "model.py").write_text(TASK)
    reference = Settings(batch=Batch(micro=16))
    request = JudgeRequest(
        id="cuts",
        task=str(tmp_path / "model.py"),
        device="cpu",
        plan=Plan(settings=reference),
        options=JudgeOptions(
            recovery=QualityOptions(num_samples=64),
            seeds=(0, 1),
            candidates=(reference.having(Pruning(kind="structured", ratio=0.5)),),
            keep=str(tmp_path / "cuts.json"),
        ),
    )
    assert isinstance(local_executor.ask(request), Crashed)
    outcome = local_executor.ask(request)
    assert isinstance(outcome, CutsJudged), outcome
    assert len((tmp_path / "calls").read_text()) == 7 + 2
    (cut,) = outcome.found.cuts
    assert len(cut.qualities) == 2
    assert "prune 50% of widths" in outcome.output
