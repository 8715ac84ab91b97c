"""torchrun under `autotune run`: a plan in each process, told by the first."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_line import autotune
from gloo_pair import needs_two
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autotune.plan import Plan
from autotune.script.plan.job import ScriptJob
from autotune.script.refusal import Refused
from autotune.script.shards import mismatch, unwrapped
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.data_loading import DataLoading
from autotune.techniques.layers import Layers
from autotune.techniques.optimizers.optimizer import Optimizer
from autotune.techniques.parallel import Parallel

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
DDP = Parallel(kind="ddp", processes=2)

OWN_LOOP = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

micro, accumulate = map(int, sys.argv[1:])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
data = TensorDataset(torch.randn(32, 4))
loader = DataLoader(data, batch_size=micro, sampler=DistributedSampler(data))
for step, (x,) in enumerate(loader):
    (ddp(x).square().mean() / accumulate).backward()
    if step % accumulate == accumulate - 1:
        optimizer.step()
        optimizer.zero_grad()
said = [type(model[1]) is nn.GELU, loader.persistent_workers, accumulate, float(model[0].weight.sum())]
every = [None] * 2
dist.all_gather_object(every, said)
if dist.get_rank() == 0:
    print(*every, sep="\\n")
"""

WITH_APPLY = """
import torch.distributed as dist
import autotune

training = autotune.apply(autotune.load_plan("plan.yaml"), autotune.load_task("model.py"))
seen = 0
for batch in training.loader:
    training.step(batch)
    seen += len(batch[0])
every = [None] * 2
dist.all_gather_object(every, (dist.get_backend(), training.batch.accumulate, seen, training.epoch))
if dist.get_rank() == 0:
    print(*every, sep="\\n")
"""


@pytest.mark.slow
@needs_two
def test_a_plan_is_in_force_in_each_process_of_an_unedited_script(tmp_path):
    """Its own DistributedDataParallel stays; what each accumulates is its share; one line tells of it."""
    settings = Settings(
        batch=Batch(micro=4, accumulate=4),
        layers=Layers(kind="rounding"),
        data_loading=DataLoading(num_workers=1, persistent_workers=True),
        parallel=DDP,
    )
    Plan(settings=settings).save(tmp_path / "plan.yaml")
    (tmp_path / "train.py").write_text(OWN_LOOP)
    command = ("run", "plan.yaml", "--", *TORCHRUN, "train.py", "{batch.micro}", "{batch.accumulate}")
    done = autotune(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second
    assert first.startswith("[False, True, 2, ")
    assert done.stderr.count("autotune: applied: ") == 1
    assert "ddp over 2 processes" in done.stderr
    assert done.left_behind == []


@pytest.mark.slow
@needs_two
def test_a_plan_is_in_force_in_both_processes_of_accelerate(tmp_path):
    settings = Settings(batch=Batch(micro=4, accumulate=4), optimizer=Optimizer(kind="foreach"), parallel=DDP)
    Plan(settings=settings).save(tmp_path / "plan.yaml")
    starter = (sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2")
    script = (Path(__file__).parents[1] / "scripts" / "accelerated.py", "--grad-accum=2", "--steps=2")
    done = autotune("run", "plan.yaml", "--", *starter, "--main_process_port=0", *script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("autotune: applied: ") == 1
    assert done.stdout == "trained in 2 with foreach True\n"
    assert done.left_behind == []


@pytest.mark.slow
@needs_two
def test_a_script_that_applies_its_plan_has_it_in_each_process(tmp_path):
    """The group is made of what torchrun says; each process trains on half of the 64 samples."""
    Plan(settings=Settings(batch=Batch(micro=4, accumulate=4), parallel=DDP)).save(tmp_path / "plan.yaml")
    task = (Path(__file__).parents[1] / "tasks" / "healthy.py").read_text()
    (tmp_path / "model.py").write_text(task + "batch_size = 16\n")
    (tmp_path / "train.py").write_text(WITH_APPLY)
    done = autotune("run", "plan.yaml", "--", *TORCHRUN, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["('gloo', 2, 32, 1)"] * 2
    assert done.left_behind == []


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(("settings", "size"), [(Settings(), "2"), (Settings(parallel=DDP), "1")])
def test_a_plan_of_another_number_of_processes_is_refused(settings, size, rank, tmp_path, monkeypatch, capsys):
    """By all, and told by the first."""
    Plan(settings=settings).save(tmp_path / "plan.yaml")
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(Refused):
        ScriptJob(tmp_path / "plan.yaml")
    said = capsys.readouterr().err
    is_told = rank == "0" or size == "1"
    assert ("settings.parallel: the plan is for " in said) == is_told


def test_a_script_that_does_not_share_its_model_out_is_refused():
    model = nn.Linear(2, 2)
    assert "the plan has ddp, but the script trains with none" in str(mismatch(Settings(parallel=DDP), model))
    assert mismatch(Settings(), model) is None


def test_the_model_within_is_found(monkeypatch):
    monkeypatch.setattr(DistributedDataParallel, "__init__", lambda self, module: nn.Module.__init__(self))
    wrapped, model = DistributedDataParallel(None), nn.Linear(2, 2)
    wrapped.module = model
    assert unwrapped(wrapped) is model
    assert unwrapped(model) is model
