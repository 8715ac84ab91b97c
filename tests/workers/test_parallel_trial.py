"""Trials of several processes on one machine: measured together, ended together."""

from __future__ import annotations

from pathlib import Path

import pytest
from gloo_pair import needs_two

from autotune.measure import MeasureOptions
from autotune.plan import Plan
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.parallel import Parallel
from autotune.workers import Crashed, Failed, Measured, MeasureRequest, Outcome, OutOfMemory
from autotune.workers.process import identify

TASK = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

batch_size = 8
num_losses = 0
with open(__file__ + ".pids", "a") as file:
    print(os.getpid(), file=file)


def build_model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def build_dataset():
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def compute_loss(model, batch):
    global num_losses
    num_losses += 1
    if num_losses == 15 and dist.is_initialized() and dist.get_rank() == 1:
        {what}
    return nn.functional.mse_loss(model(batch[0]), batch[1])
"""
TENSOR = Parallel(kind="tensor", processes=2)
DDP = Settings(batch=Batch(micro=4, accumulate=2), parallel=Parallel(kind="ddp", processes=2))


def run(executor, folder: Path, what: str = "pass", settings: Settings = DDP, **changes: object) -> Outcome:
    """A trial whose second process does this in its fifteenth forward; afterwards no process of it is left."""
    task = folder / "task.py"
    task.write_text(TASK.format(what=what))
    options = MeasureOptions(trial_time_s=0.2, parity_batch=8)
    fields = {"id": "ranks", "task": str(task), "device": "cpu", "plan": Plan(settings=settings), "options": options}
    outcome = executor.submit(MeasureRequest(**{**fields, "deadline_s": 300, **changes})).result()
    pids = (folder / "task.py.pids").read_text().split() if settings.parallel.processes < 9 else []
    assert [pid for pid in pids if identify(int(pid))] == []
    return outcome


@pytest.mark.slow
@needs_two
@pytest.mark.parametrize("fresh", [False, True])
def test_a_trial_in_two_processes_is_measured_as_one(local_executor, tmp_path, fresh):
    """Losses of one process; memory of both; speed in samples of both."""
    alone = run(local_executor, tmp_path, settings=Settings(batch=Batch(micro=4, accumulate=2)), fresh=fresh)
    both = run(local_executor, tmp_path, fresh=fresh)
    assert isinstance(alone, Measured), alone
    assert isinstance(both, Measured), both
    assert both.measurement.parity.losses == pytest.approx(alone.measurement.parity.losses, rel=1e-4)
    assert 1.6 < both.measurement.peak.process / alone.measurement.peak.process < 2.6
    assert both.measurement.num_steps >= both.measurement.num_windows
    assert both.measurement.samples_per_s.value > 0
    assert len(set((tmp_path / "task.py.pids").read_text().split())) == 3


@pytest.mark.slow
@needs_two
def test_a_trial_of_split_layers_has_the_losses_of_one_process(local_executor, tmp_path):
    """Each process computes on every sample: one micro-batch is enough for two of them."""
    whole, split = Settings(batch=Batch(micro=8)), Settings(batch=Batch(micro=8), parallel=TENSOR)
    alone, both = (run(local_executor, tmp_path, settings=one) for one in (whole, split))
    assert isinstance(alone, Measured), alone
    assert isinstance(both, Measured), both
    assert both.measurement.parity.losses == pytest.approx(alone.measurement.parity.losses, rel=1e-4)
    assert len(both.measurement.bytes_by_rank) == 2


ENDINGS = {
    "raise ValueError('mine')": (Failed, "ValueError: mine"),
    "raise torch.OutOfMemoryError('CUDA out of memory')": (OutOfMemory, "CUDA out of memory"),
    "os.kill(os.getpid(), 11)": (Crashed, "SIGSEGV"),
}


@needs_two
@pytest.mark.parametrize("what", ENDINGS)
def test_one_process_that_fails_ends_the_trial_with_its_reason(local_executor, tmp_path, what):
    """The other one, which waits for its gradients, is ended; what it said of the lost connection is not told."""
    kind, message = ENDINGS[what]
    outcome = run(local_executor, tmp_path, what)
    assert isinstance(outcome, kind), outcome
    assert message in outcome.message


def test_more_processes_than_processors_are_refused(local_executor, tmp_path):
    many = Settings(batch=Batch(micro=1, accumulate=4096), parallel=Parallel(kind="ddp", processes=4096))
    outcome = run(local_executor, tmp_path, settings=many)
    assert isinstance(outcome, Failed), outcome
    assert "4096 were asked for, but a trial has" in outcome.message
