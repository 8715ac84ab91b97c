"""What ``apply`` is made of, for trainers of their own: a plan on a model, on an optimizer, on a dataset."""

from __future__ import annotations

import pytest
import torch
from line_task import floats, line, training_of
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

import autotune
from autotune.plan import Plan
from autotune.randomness import seed_everything
from autotune.techniques import TECHNIQUES, Settings, Stage
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.data_loading import DataLoading
from autotune.techniques.layers import Layers
from autotune.techniques.optimizers.optimizer import Optimizer
from autotune.testing.runs import run_applied
from autotune.testing.zoo import ZOO

SETTINGS = Settings(
    batch=Batch(micro=8),
    layers=Layers(kind="exact"),
    checkpointing=Checkpointing(kind="blocks", every=2),
    data_loading=DataLoading(num_workers=0, cache="host"),
    optimizer=Optimizer(kind="foreach"),
)


pytestmark = pytest.mark.usefixtures("one_thread_only")


@pytest.mark.parametrize("times", [1, 2])
def test_a_loop_of_ones_own_trains_as_apply_does_bit_for_bit(times):
    """Model, optimizer and loader by the three functions, each called once or twice, in a plain torch loop."""
    task, plan = ZOO["gpt"], Plan(settings=SETTINGS)
    seed_everything(0)
    model, dataset = task.build_model(), task.build_dataset()
    for _ in range(times):
        model = autotune.apply_to_model(plan, model)
    optimizer = task.make_optimizer(model)
    for _ in range(times):
        optimizer = autotune.apply_to_optimizer(plan, optimizer)
        spec = autotune.apply_to_loader(plan, dataset, collate=task.collate)
    sampler = RandomSampler(spec.dataset, generator=torch.Generator().manual_seed(0))
    for batch in DataLoader(spec.dataset, 8, sampler=sampler, collate_fn=spec.collate, **spec.options):
        task.compute_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = run_applied(task, SETTINGS).state
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_an_earlier_plan_is_taken_off_from_the_outside_in():
    """Checkpointing stands over the layers: both are gone, and the module classes are the model's own."""
    model = ZOO["resnet"].build_model()
    before = [type(module) for module in model.modules()]
    autotune.apply_to_model(Plan(settings=SETTINGS), model)
    assert [type(module) for module in model.modules()] != before
    assert autotune.apply_to_model(Plan(settings=Settings()), model) is model
    assert [type(module) for module in model.modules()] == before
    assert not any("forward" in vars(module) for module in model.modules())


def test_techniques_come_into_force_in_the_order_of_their_stages():
    """Whatever their rows' order in a plan is."""
    stages = {name: technique.stage for name, technique in TECHNIQUES.items()}
    named = [
        "variant",
        "pruning",
        "low_rank",
        "layers",
        "checkpointing",
        "memory_format",
        "precision",
        "compile",
        "parallel",
    ]
    assert sorted(named, key=lambda name: stages[name]) == named
    assert len({stages[name] for name in named}) == len(named)
    assert stages["optimizer"] is Stage.OPTIMIZER
    assert stages["data_loading"] is Stage.LOADER


class Wrapped(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


def test_what_a_hook_returns_takes_the_place_of_what_it_was_given(monkeypatch):
    """A model around the model, whose parameters the optimizer gets, and another optimizer."""
    replaced = []

    def on_optimizer(self, optimizer, max_grad_norm=None):
        replaced.append((optimizer, max_grad_norm))
        return torch.optim.SGD(optimizer.param_groups, lr=0.5)

    monkeypatch.setattr(Layers, "on_model", lambda self, model, blocks, run=None: Wrapped(model))
    monkeypatch.setattr(Optimizer, "on_optimizer", on_optimizer)
    training = training_of(line(floats(2), max_grad_norm=3.0))
    assert type(training.model) is Wrapped
    assert training.optimizer.defaults["lr"] == 0.5
    (first, norm) = replaced[0]
    assert norm == 3.0
    assert first is not training.optimizer
