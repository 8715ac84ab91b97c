"""BatchNorm, residual sums and ReLU that are computed again for the next convolution."""

from __future__ import annotations

import pytest
import torch
from layer_runs import assert_same, run, twins
from torch import Tensor, nn
from torch.nn import functional as F

from autotune.layers.rematerialization import Remat

WIDTH = 8
SHAPE = (4, WIDTH, 16, 16)
INPUT = 4 * WIDTH * 16 * 16 * 4
STATISTICS = 2 * WIDTH * 4
"""Bytes of a BatchNorm's mean and variance."""


class Block(nn.Module):
    """He et al. 2015, arXiv:1512.03385, without a change of size; the sum in place or not."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(WIDTH), nn.BatchNorm2d(WIDTH)
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.inplace:
            out += x
        else:
            out = out + x
        return F.relu(out)


def stack(num_blocks: int, inplace: bool = True) -> nn.Module:
    return nn.Sequential(*(Block(inplace) for _ in range(num_blocks)), nn.Conv2d(WIDTH, WIDTH, 1))


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("num_blocks", [1, 2, 4])
def test_of_four_tensors_a_block_two_are_kept(num_blocks: int, inplace: bool):
    """Both norms' inputs; of both ReLUs, which the convolutions would keep, a bit an element."""
    stock, ours = twins(lambda: stack(num_blocks, inplace))
    x = torch.randn(SHAPE)
    wanted, found = run(stock, x), run(ours, x)
    assert_same(found, wanted, 1e-4)
    assert wanted.kept == (4 * num_blocks + 1) * INPUT + 2 * num_blocks * STATISTICS
    assert found.kept == (2 * num_blocks + 1) * INPUT + 2 * num_blocks * (INPUT // 32 + STATISTICS)


def test_after_four_sums_one_is_kept():
    """What is computed again lies in memory together: the fifth block's output is kept, and a chain begins there."""
    stock, ours = twins(lambda: stack(9))
    x = torch.randn(SHAPE)
    wanted, found = run(stock, x), run(ours, x)
    assert_same(found, wanted, 1e-3)
    assert found.kept == (2 * 9 + 1 + 1) * INPUT + 18 * STATISTICS + 17 * (INPUT // 32)


def test_a_sum_of_what_nobody_keeps_is_kept_itself():
    """With the first convolution frozen its input is lost, and with it the sum."""
    stock, ours = twins(lambda: stack(1))
    for model in (stock, ours):
        model[0].conv1.requires_grad_(False)
    x = torch.randn(SHAPE)
    wanted, found = run(stock, x), run(ours, x)
    assert_same(found, wanted, 1e-4)
    assert wanted.kept == 4 * INPUT + INPUT + 2 * STATISTICS  # a stock convolution keeps its input even frozen
    assert found.kept == 3 * INPUT + INPUT // 32 + 2 * STATISTICS


@pytest.mark.parametrize("context", [{}, {"dtype": torch.bfloat16}])
def test_never_more_than_stock_whatever_trains_and_under_autocast(context: dict[str, torch.dtype]):
    for part in ("conv1", "norm1", "conv2", "norm2"):
        for trains in (True, False):
            stock, ours = twins(lambda: stack(3), trains=not trains)
            for model in (stock, ours):
                for block in model[:-1]:
                    getattr(block, part).requires_grad_(trains)
            x = torch.randn(SHAPE)
            wanted, found = run(stock, x, **context), run(ours, x, **context)
            assert_same(found, wanted, 5e-2 if context else 1e-4)
            assert found.kept <= wanted.kept


def test_what_is_computed_again_is_dropped_once_the_last_has_had_it():
    _, ours = twins(lambda: stack(4))
    x = torch.randn(SHAPE, requires_grad=True)
    output = ours(x * 1.0)
    nodes, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting += [following for following, _ in node.next_functions]
    output.sum().backward()
    noted = [note[0] for node in nodes for note in node.metadata.values() if isinstance(note, tuple)]
    remats = [remat for remat in noted if isinstance(remat, Remat)]
    assert len(remats) == 4 * 5  # two norms, two ReLUs, a sum
    assert all(remat._value is None for remat in remats)


def test_a_second_backward_through_the_same_graph():
    _, ours = twins(lambda: stack(3))
    x = torch.randn(SHAPE, requires_grad=True)
    output = ours(x).sum()
    once = torch.autograd.grad(output, x, retain_graph=True)
    twice = torch.autograd.grad(output, x)
    assert torch.equal(once[0], twice[0])
