"""A plan in Ray Train's loop trains as ``apply`` and ``Training`` do, or says why it cannot."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import ray_job
import torch
from ray_job import PLAN
from torch import nn
from torch.utils.data import SequentialSampler

import autotune
from autotune.errors import PlanError
from autotune.integrations import ray_train
from autotune.measure.timing.disturbance import one_thread
from autotune.plan import Budget, Plan, TaskRef
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.layers import Layers
from autotune.techniques.models.low_rank import LowRank
from autotune.techniques.models.pruning import Pruning
from autotune.techniques.models.variant import Variant
from autotune.techniques.precision import Precision
from autotune.testing.zoo import ZOO
from autotune.training.fingerprint import identify

ray = pytest.importorskip("ray", reason="Ray is not installed")

JOBS = ("resnet", "gpt")


LACKING = [name for name in ("pandas", "pyarrow") if importlib.util.find_spec(name) is None]
"""Of what ``import ray.train`` needs."""


@pytest.fixture
def worker(monkeypatch):
    """A stand-in for Ray Train in its only worker: a CPU, and functions that hand back what they are given."""
    torch_part, train = ModuleType("ray.train.torch"), ModuleType("ray.train")
    torch_part.get_device = lambda: torch.device("cpu")
    torch_part.prepare_model = lambda model, **_: model
    torch_part.prepare_data_loader = lambda loader, **_: loader
    train.torch, train.num_workers = torch_part, 1
    train.get_context = lambda: SimpleNamespace(get_world_size=lambda: train.num_workers)
    train.RunConfig = train.ScalingConfig = lambda **arguments: arguments
    monkeypatch.setitem(sys.modules, "ray.train", train)
    monkeypatch.setitem(sys.modules, "ray.train.torch", torch_part)
    monkeypatch.setattr(ray, "train", train, raising=False)
    with one_thread():
        yield train


def expected(name: str) -> list[float]:
    """Of the same plan by ``apply``."""
    task = autotune.Task(
        build_model=ZOO[name].build_model,
        build_dataset=lambda: ray_job.loader(name).dataset,
        compute_loss=ZOO[name].compute_loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        build_sampler=SequentialSampler,
        batch_size=8,
    )
    training = autotune.apply(PLAN, task)
    return [training.step(batch).loss.item() for batch in training.loader]


def check(seen: dict, name: str) -> None:
    assert seen["losses"] == pytest.approx(expected(name), rel=1e-6)
    assert (seen["autocast"], seen["samples"], seen["fused"]) == (True, 4, True)
    assert seen["recomputed"] == 2  # every second of four blocks, and of three


@pytest.mark.parametrize("name", JOBS)
def test_a_loop_trains_as_training_does_and_says_what_is_in_force(name, worker, capsys):
    check(ray_job.train(name), name)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("autotune: ")]
    assert line.startswith(
        "autotune: applied by Ray Train: micro-batch 4 × 2, bf16, memory-saving layers, checkpoint every 2nd"
    )


@pytest.mark.slow
@pytest.mark.skipif(bool(LACKING), reason=f"ray[train] is not installed whole: it lacks {' and '.join(LACKING)}")
@pytest.mark.parametrize("name", ["gpt"])
def test_a_worker_of_a_cluster_does(name, ray_executor, tmp_path):
    """With the plan's threads, which are not the one that Ray gives for its share of a processor."""
    command = [sys.executable, ray_job.__file__, ray_executor.address, str(tmp_path), name]
    joins = {"env": {**os.environ, "RAY_AUTH_MODE": "token"}, "cwd": Path(__file__).parents[2]}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **joins)
    assert done.returncode == 0, done.stderr
    seen = json.loads((tmp_path / "seen.json").read_text())
    with one_thread():
        check(seen, name)
    assert (seen["threads"], seen["variable"]) == (2, "2")


def test_a_run_is_configured_with_the_plans_device_and_environment(worker, monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert ray_train.environment(PLAN) == {"OMP_NUM_THREADS": "2"}
    own = {"pip": ["x"], "env_vars": {"A": "1"}}
    assert ray_train.run_config(PLAN, name="run", worker_runtime_env=own) == {
        "name": "run",
        "worker_runtime_env": {"pip": ["x"], "env_vars": {"A": "1", "OMP_NUM_THREADS": "2"}},
    }
    assert ray_train.scaling_config(PLAN) == {"num_workers": 1, "use_gpu": False, "resources_per_worker": {"CPU": 2}}
    assert ray_train.scaling_config(Plan(budget=Budget(device="cuda"), settings=Settings()))["use_gpu"] is True


@pytest.mark.parametrize(
    ("configure", "message"),
    [
        (lambda: ray_train.scaling_config(PLAN, num_workers=2), "one process of Ray Train so far, but got 2"),
        (lambda: ray_train.scaling_config(PLAN, num_workers=(1, 4)), "but got 4"),
        (lambda: ray_train.scaling_config(PLAN, use_gpu=True), "the plan is for cpu"),
        (
            lambda: ray_train.run_config(PLAN, worker_runtime_env={"env_vars": {"OMP_NUM_THREADS": "8"}}),
            "needs OMP_NUM_THREADS=2, but got 8",
        ),
    ],
)
def test_a_configuration_that_contradicts_the_plan_is_refused(configure, message, worker):
    with pytest.raises(PlanError, match=message):
        configure()


def of(**settings) -> Plan:
    return Plan(settings=Settings(**settings))


def test_a_loop_that_accumulates_otherwise_is_stopped_at_its_first_step(worker):
    with pytest.raises(PlanError, match="after 1 backward passes"):
        ray_job.train("gpt", accumulate=1)


@pytest.mark.parametrize("plan", [of(precision=Precision(kind="bf16")), of(layers=Layers(kind="exact"))])
def test_a_forward_outside_the_context_is_an_error(plan, worker):
    model = ray_train.prepare_model(plan, nn.Linear(1, 1))
    ray_train.prepare_optimizer(plan, model, torch.optim.SGD(model.parameters()))
    with pytest.raises(PlanError, match=r"outside `with ray_train\.forward_context"):
        model(torch.ones(1, 1))


def test_after_the_first_step_nothing_is_watched(worker):
    plan = of(batch=Batch(micro=1))
    model = ray_train.prepare_model(plan, nn.Linear(1, 1))
    optimizer = ray_train.prepare_optimizer(plan, model, torch.optim.SGD(model.parameters()))
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        model(torch.ones(1, 1)).sum().backward()
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize(
    "row", [Pruning(kind="structured", ratio=0.5), LowRank(kind="svd")], ids=["pruning", "low_rank"]
)
def test_a_smaller_model_is_there_before_its_optimizer(row, worker):
    """What takes parameters away is put on the model that the loop then builds its optimizer from."""
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    before = sum(p.numel() for p in model.parameters())
    plan = Plan(settings=Settings().having(row))
    made = ray_train.prepare_model(plan, model, run=lambda one: one(torch.ones(2, 128)).sum())
    assert sum(p.numel() for p in made.parameters()) < before


@pytest.mark.parametrize("what", ["workers", "fp16", "device", "model", "variant"])
def test_what_cannot_be_in_force_is_an_error_with_the_reason(what, worker):
    fingerprint, identity = identify(nn.Linear(2, 2), ())
    task = TaskRef(source="x.py", fingerprint=fingerprint, identity=identity)
    plans = {
        "workers": of(),
        "fp16": of(precision=Precision(kind="fp16")),
        "device": Plan(budget=Budget(device="cuda"), settings=Settings()),
        "model": Plan(task=task, settings=Settings()),
        "variant": of(variant=Variant(kind="small")),
    }
    messages = {
        "workers": "so far, but got 2",
        "fp16": "needs a loss scaler",
        "device": "for cuda, but this worker trains on cpu",
        "model": "for another model",
        "variant": r"settings\.variant: it makes another model",
    }
    worker.num_workers = 2 if what == "workers" else 1
    with pytest.raises(PlanError, match=messages[what]):
        ray_train.prepare_model(plans[what], nn.Linear(1, 1))


def test_only_a_dataloader_is_prepared(worker):
    with pytest.raises(PlanError, match="takes a torch DataLoader, but got list"):
        ray_train.prepare_data_loader(of(), [1])


def test_what_to_write_is_python():
    text = ray_train.written(PLAN)
    compile(text, "written", "exec")
    assert "(loss / 2).backward()" in text
    assert "number % 2 == 0" in text
