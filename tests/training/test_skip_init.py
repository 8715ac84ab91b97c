"""A model without drawn values: the same parameters, in no time and no memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autotune.measure.processes import own_live_bytes
from autotune.task import Task
from autotune.testing.zoo import ZOO
from autotune.training.skip_init import skip_init
from autotune.units import MIB


def task_of(build):
    return Task(build_model=build, build_dataset=list, compute_loss=lambda model, batch: model(batch).sum())


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt", "tied"])
def test_parameters_and_buffers_are_those_of_the_model(name):
    drawn, left = ZOO[name].build_model(), skip_init(ZOO[name]).build_model()
    assert [(key, one.shape, one.dtype, one.stride()) for key, one in left.state_dict().items()] == [
        (key, one.shape, one.dtype, one.stride()) for key, one in drawn.state_dict().items()
    ]
    assert repr(left) == repr(drawn)


def test_nothing_is_drawn_and_what_is_set_is_set():
    before = torch.get_rng_state()
    model = skip_init(task_of(lambda: nn.LayerNorm(3))).build_model()
    skip_init(task_of(lambda: nn.Linear(3, 3))).build_model()
    assert torch.equal(torch.get_rng_state(), before)
    assert model.weight.tolist() == [1.0, 1.0, 1.0]


def test_a_gibibyte_of_parameters_takes_no_memory():
    before = own_live_bytes()
    model = skip_init(task_of(lambda: nn.Linear(2**14, 2**14, bias=False))).build_model()
    assert sum(one.nbytes for one in model.parameters()) == 1024 * MIB
    assert own_live_bytes() - before < 64 * MIB


def asks_once():
    model = nn.Linear(64, 64)
    if not 0.01 < model.weight.std() < 1:
        raise ValueError("no model")
    return model


def draws_until_it_is_content():
    model = nn.Linear(64, 64)
    with torch.no_grad():
        while not 0.01 < model.weight.norm() / 64 < 1:
            model.weight.normal_()
    return model


def is_truncated():
    """torch draws what lies outside anew until nothing does."""
    model = nn.Linear(64, 64)
    nn.init.trunc_normal_(model.weight, mean=1.0, std=0.02, a=0.9, b=1.1)
    return model


@pytest.mark.parametrize("build", [asks_once, draws_until_it_is_content, is_truncated])
def test_a_model_that_looks_at_its_values_is_the_one_that_it_would_have_been(build):
    torch.manual_seed(7)
    model = skip_init(task_of(build)).build_model()
    torch.manual_seed(7)
    assert torch.equal(model.weight, build().weight)


def test_a_model_may_look_at_what_it_has_not_drawn():
    """Such as the share of paths that each layer drops."""

    def build():
        model = nn.Linear(2**10, 2**10)
        model.rates = [float(rate) for rate in torch.linspace(0, 0.1, 3)]
        return model

    before = torch.get_rng_state()
    assert len(skip_init(task_of(build)).build_model().rates) == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_an_error_of_the_model_is_its_own():
    def build():
        raise ValueError("no layers")

    with pytest.raises(ValueError, match="no layers"):
        skip_init(task_of(build)).build_model()
