"""What the published memory-saving layers get wrong, and these do not. docs/inside/layers.md has the list.

Source: plutonium-239/memsave_torch at 154f88c, on torch 2.13. Failures that test_layers.py has a test for are not here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_bytes import kept_bytes
from layer_runs import IMAGES, assert_same, run, twins
from torch import Tensor, nn


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_max_pooling_returns_indices_when_it_is_asked_to(ceil_mode: bool):
    stock, ours = twins(lambda: nn.MaxPool2d(3, 2, return_indices=True, ceil_mode=ceil_mode))
    x = torch.randn(IMAGES, requires_grad=True)
    (wanted, places), (found, same_places) = stock(x), ours(x)
    assert torch.equal(found, wanted)
    assert torch.equal(same_places, places)


def test_under_autocast_a_convolution_computes_in_bf16_and_a_chain_behind_it_trains():
    def build() -> nn.Module:
        norm = [nn.BatchNorm2d(8), nn.ReLU()]
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), *norm, nn.Linear(16, 16), nn.Conv2d(8, 8, 1))

    stock, ours = twins(build)
    dtypes = []
    ours[0].register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    x = torch.randn(IMAGES)
    assert_same(run(ours, x, dtype=torch.bfloat16), run(stock, x, dtype=torch.bfloat16), 2e-2)
    assert dtypes == [torch.bfloat16]


def test_a_relu_in_place_makes_no_other_tensor():
    _, ours = twins(lambda: nn.ReLU(inplace=True))
    x = torch.randn(IMAGES, requires_grad=True) * 1.0
    assert ours(x) is x
    assert bool((x >= 0).all())


def test_a_batch_norm_counts_its_batches():
    _, ours = twins(lambda: nn.BatchNorm2d(8))
    for _ in range(3):
        run(ours, torch.randn(IMAGES))
    assert int(ours.num_batches_tracked) == 3


@pytest.mark.parametrize("trains", [True, False])
def test_a_batch_norm_without_statistics_takes_the_batchs_in_eval_mode_too(trains: bool):
    stock, ours = twins(lambda: nn.BatchNorm2d(8, track_running_stats=False).eval(), trains)
    x = torch.randn(IMAGES)
    assert_same(run(ours, x), run(stock, x))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_a_batch_norm_in_bf16(trains: bool, training: bool):
    stock, ours = twins(lambda: nn.BatchNorm2d(8).bfloat16().train(training), trains)
    x = torch.randn(IMAGES, dtype=torch.bfloat16)
    assert_same(run(ours, x), run(stock, x), 2e-2)


def test_dropout_in_eval_mode_drops_and_keeps_nothing():
    _, ours = twins(lambda: nn.Dropout(0.3).eval())
    x = torch.randn(IMAGES)
    ran = run(ours, x)
    assert torch.equal(ran.output, x)
    assert ran.kept == 0


class _Sized(nn.Module):
    """Calls a transposed convolution for an output of some size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ConvTranspose2d(8, 4, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, output_size=(34, 34))


@pytest.mark.parametrize("trains", [True, False])
def test_a_transposed_convolution_takes_an_output_size(trains: bool):
    stock, ours = twins(_Sized, trains)
    x = torch.randn(IMAGES)
    found = run(ours, x)
    assert found.output.shape[2:] == (34, 34)
    assert_same(found, run(stock, x))


class _Residual(nn.Module):
    """A block of a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + x)


def _resnet() -> nn.Module:
    stem = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
    return nn.Sequential(*stem, _Residual(), _Residual(), *head)


@pytest.mark.parametrize("frozen", [None, nn.Conv2d, nn.BatchNorm2d, (nn.Conv2d, nn.BatchNorm2d)])
def test_a_resnet_never_keeps_more_than_stock(frozen: Any):
    """A ReLU's bits come on top where the next layer keeps its output: fully trained, the peer keeps 1.09 of stock."""
    models = twins(_resnet)
    for model in models:
        for module in model.modules():
            if frozen is not None and isinstance(module, frozen):
                module.requires_grad_(False)
    x = torch.randn(IMAGES)
    wanted, found = (run(model, x) for model in models)
    assert_same(found, wanted)
    assert found.kept <= wanted.kept


class _Hidden(torch.autograd.Function):
    """Keeps a mask as the peer does: as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mask = x > 0
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.mask


def test_a_mask_that_hooks_on_saved_tensors_do_not_see_is_counted():
    """So that the tests and the benchmark would find it: a byte an element, of the four that ReLU keeps."""
    x = torch.randn(IMAGES, requires_grad=True)
    kept, _ = kept_bytes(lambda: _Hidden.apply(x * 1.0) + 1.0, nn.Identity())
    assert kept == x.numel()


def test_the_documented_list_names_tests_that_there_are():
    here = Path(__file__).parent
    page = here.parents[1] / "docs" / "inside" / "layers.md"
    listed = page.read_text().partition("## What the published implementation")[2]
    sources = "".join((here / name).read_text() for name in ("test_layers.py", "test_layers_peer_failures.py"))
    named = set(re.findall(r"`(test_\w+)`", listed))
    assert named
    assert named <= set(re.findall(r"^def (test_\w+)", sources, re.MULTILINE))
