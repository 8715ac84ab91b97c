"""A model without drawn values: the same parameters, in no time and no memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autotune.measure.processes import own_live_bytes
from autotune.task import Task
from autotune.testing.zoo import ZOO
from autotune.unfilled import unfilled
from autotune.units import MIB


def task_of(build):
    return Task(build_model=build, build_dataset=list, compute_loss=lambda model, batch: model(batch).sum())


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt", "tied"])
def test_parameters_and_buffers_are_those_of_the_model(name):
    drawn, left = ZOO[name].build_model(), unfilled(ZOO[name]).build_model()
    assert [(key, one.shape, one.dtype, one.stride()) for key, one in left.state_dict().items()] == [
        (key, one.shape, one.dtype, one.stride()) for key, one in drawn.state_dict().items()
    ]
    assert repr(left) == repr(drawn)


def test_nothing_is_drawn_and_what_is_set_is_set():
    before = torch.get_rng_state()
    model = unfilled(task_of(lambda: nn.LayerNorm(3))).build_model()
    unfilled(task_of(lambda: nn.Linear(3, 3))).build_model()
    assert torch.equal(torch.get_rng_state(), before)
    assert model.weight.tolist() == [1.0, 1.0, 1.0]


def test_a_gibibyte_of_parameters_takes_no_memory():
    before = own_live_bytes()
    model = unfilled(task_of(lambda: nn.Linear(2**14, 2**14, bias=False))).build_model()
    assert sum(one.nbytes for one in model.parameters()) == 1024 * MIB
    assert own_live_bytes() - before < 64 * MIB


def test_a_model_that_looks_at_its_values_has_them():
    def build():
        model = nn.Linear(64, 64)
        if not 0.01 < model.weight.std() < 1:
            raise ValueError("no model")
        return model

    with torch.no_grad():
        assert 0.01 < unfilled(task_of(build)).build_model().weight.std() < 1
