"""Who keeps what: one run over fake tensors against what the structure tells."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from layer_runs import IMAGES, run, twins
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autotune.layers import convert
from autotune.layers.saved_by import SharedSavers, find_savers

INPUT = 4 * 8 * 16 * 16 * 4


class Skip(nn.Module):
    """As in a U-Net: a concatenation copies what the activation returned, so that nobody keeps that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 1), nn.Conv2d(16, 8, 1)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.cat([self.act(self.first(x)), x], 1))


def test_an_activation_whose_output_nobody_keeps_keeps_bits():
    x = torch.randn(IMAGES)
    stock, traced = twins(Skip, True, x)
    _, guessed = twins(Skip)
    assert run(stock, x).kept == run(guessed, x).kept == 4 * INPUT
    assert run(traced, x).kept == 3 * INPUT + INPUT // 32


class Scaled(nn.Module):
    """A product keeps both its factors, and a convolution its input while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8, 1, 1))
        self.conv = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.relu(F.relu(x) * self.scale))


def test_weights_keep_while_they_train_and_products_always():
    model = Scaled()
    (weights, always), _ = find_savers(model, lambda copied: copied(torch.randn(IMAGES)))[model]
    assert len(weights) == 1
    assert weights[0] is model.conv.weight
    assert always
    chain = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Dropout(), nn.ReLU(), nn.Conv2d(8, 8, 1))
    found = find_savers(chain, lambda copied: copied(torch.randn(IMAGES)))
    nobody = [], False
    assert found == {chain[1]: (nobody, nobody), chain[3]: (([chain[4].weight], False), nobody)}


def test_what_one_copy_has_shown_holds_for_the_next():
    model, shared, runs = Scaled(), SharedSavers(), []

    def forward(copied: nn.Module) -> Tensor:
        runs.append(copied)
        return copied(torch.randn(IMAGES))

    with shared:
        find_savers(model, forward)
        other = copy.deepcopy(model)
        ((weights, always), read) = find_savers(other, forward)[other]
    assert len(runs) == 1
    assert len(weights) == 1
    assert weights[0] is other.conv.weight
    assert (always, read) == (True, ([], False))
    find_savers(other, forward)
    assert len(runs) == 2


def test_a_run_that_fails_shows_nothing():
    model, shared = Scaled(), SharedSavers()
    with shared:
        with pytest.raises(RuntimeError, match="no"):
            find_savers(model, fails)
        assert find_savers(model, lambda copied: copied(torch.randn(IMAGES)))


def fails(copied: nn.Module) -> None:
    raise RuntimeError("no")


class Recomputed(nn.Module):
    """Within a checkpoint nobody keeps anything."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.conv = nn.ReLU(), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.conv(self.act(x)), x, use_reentrant=False)


def test_who_saves_within_a_checkpoint_keeps_nothing():
    model = Recomputed()
    assert find_savers(model, lambda copied: copied(torch.randn(IMAGES)))[model.act][0] == ([], False)


@pytest.mark.parametrize("example", ["tensor", "tuple", "dict", "function"])
def test_an_example_is_what_a_model_is_called_with_or_what_calls_it(example: str):
    x = torch.randn(IMAGES)
    given = {"tensor": x, "tuple": (x,), "dict": {"x": x}, "function": lambda model: model(x).sum()}[example]
    model = convert(Skip(), given)
    assert run(model, x).kept == 3 * INPUT + INPUT // 32


class Counting(nn.Module):
    """A forward that leaves traces, and reads a value."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.calls, self.reads = 0, reads
        self.norm, self.act = nn.BatchNorm2d(8), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.act(self.norm(x))
        return x * 2 if self.reads and x.sum().item() > 0 else x


def test_the_model_and_the_random_numbers_are_as_they_were():
    model = Counting(reads=False)
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    x = torch.randn(IMAGES)
    torch.set_rng_state(state)
    convert(model, x)
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_model_that_reads_values_is_converted_by_its_structure_and_that_is_said():
    model = Counting(reads=True).requires_grad_(False)
    x = torch.randn(IMAGES)
    with pytest.warns(UserWarning, match="was decided by the model's structure"):
        convert(model, x)
    assert run(model, x).kept < run(Counting(reads=True), x).kept


def test_nothing_stays_of_an_examples_run():
    """A tanh saves its own output: where a hook hands that back as it is, its node holds itself."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    weight = weakref.ref(model[0].weight)
    convert(model, torch.randn(2, 4))
    del model
    gc.collect()
    assert weight() is None
