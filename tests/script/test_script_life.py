"""What a script does between two epochs is seen in a trial: it saves, by whatever saves, and goes on from that."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autotune.measure import MeasureOptions
from autotune.measure.measurement import LifeOptions
from autotune.plan import Plan
from autotune.script.command import under_launcher
from autotune.techniques import Settings
from autotune.workers import Executor, Measured, MeasureRequest

pytestmark = pytest.mark.slow

HEAD = """
import os, torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
x = torch.randn(64, 256)
loader = DataLoader(TensorDataset(x), 16)
model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
"""
LOOP = """
optimizer = torch.optim.Adam(model.parameters())
if os.path.exists("saved"):
    {load}
for epoch in range(100_000):
    for (batch,) in loader:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    {save}
"""
BY_HAND = {
    "torch.save": ('torch.save(model.state_dict(), "saved")', 'model.load_state_dict(torch.load("saved"))'),
    "safetensors": ('save_file(model.state_dict(), "saved")', 'model.load_state_dict(load_file("saved"))'),
    "a sharded checkpoint": (
        'dcp.save({"model": model.state_dict()}, checkpoint_id="saved")',
        'dcp.load({"model": model.state_dict()}, checkpoint_id="saved")',
    ),
}
LIGHTNING = """
import lightning
class Job(lightning.LightningModule):
    def __init__(self): super().__init__(); self.model = model
    def training_step(self, batch, number): return self.model(batch[0]).square().mean()
    def configure_optimizers(self): return torch.optim.Adam(self.parameters())
trainer = lightning.Trainer(max_epochs=100_000, accelerator="cpu", logger=False, enable_progress_bar=False)
trainer.fit(Job(), loader)
"""
TRAINER = """
from transformers import Trainer, TrainingArguments
class Job(nn.Module):
    def __init__(self): super().__init__(); self.model = model
    def forward(self, x): return {"loss": self.model(x).square().mean()}
data = [{"x": row} for row in x]
options = dict(num_train_epochs=100_000, save_strategy="epoch", save_total_limit=1, report_to=[], disable_tqdm=True)
Trainer(Job(), TrainingArguments("out", use_cpu=True, **options), train_dataset=data).train()
"""


def measured(folder: Path, body: str, executor: Executor) -> Measured:
    script = folder / "script.py"
    script.write_text(HEAD + body)
    request = MeasureRequest(
        id="life",
        task="script.py",
        command=tuple(under_launcher([sys.executable, str(script)]) or ()),
        device="cpu",
        fresh=True,
        plan=Plan(settings=Settings()),
        options=MeasureOptions(trial_time_s=0.5, parity_batch=None, life=LifeOptions(most_s=60)),
        deadline_s=300,
    )
    outcome = executor.submit(request).result()
    assert isinstance(outcome, Measured), outcome
    return outcome


@pytest.mark.parametrize("how", BY_HAND)
def test_a_script_saves_and_resumes(
    how: str, tmp_path: Path, local_executor: Executor, monkeypatch: pytest.MonkeyPatch
):
    """The process that resumes finds what the trial's own has saved."""
    monkeypatch.chdir(tmp_path)
    save, load = BY_HAND[how]
    found = measured(tmp_path, LOOP.format(save=save, load=load), local_executor)
    phases = found.measurement.peak.phases
    assert {*phases} >= {"training", "saving", "resuming"}
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("body", [LIGHTNING, TRAINER], ids=["Lightning", "transformers"])
def test_a_framework_saves(body: str, tmp_path: Path, local_executor: Executor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert "saving" in measured(tmp_path, body, local_executor).measurement.peak.phases


AHEAD = """
loader = DataLoader(TensorDataset(x), 16, sampler=[0] * 4_000_000)
def ahead(batches):
    batches = iter(batches)
    this = next(batches)
    for following in batches:
        yield this
        this = following
    yield this
"""


def test_a_loop_that_reads_a_batch_ahead_saves_at_the_end_of_its_epoch(
    tmp_path: Path, local_executor: Executor, monkeypatch: pytest.MonkeyPatch
):
    """One more step follows there, of the batch that was read before the epoch ended."""
    monkeypatch.chdir(tmp_path)
    loop = LOOP.format(save='torch.save(model.state_dict(), "saved")', load="pass").replace(
        "in loader", "in ahead(loader)"
    )
    assert "saving" in measured(tmp_path, AHEAD + loop, local_executor).measurement.peak.phases
