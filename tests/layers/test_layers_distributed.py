"""Converted models under DistributedDataParallel: two processes, and the gradients of both halves of a batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gloo_pair import found_by_two, run_as_two
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autotune.layers import convert

RANKS = 2


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16, 32), nn.GELU(), nn.Linear(32, 4))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    for _ in range(2):  # the second step meets the buckets that the first has built
        model.zero_grad()
        model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def are_alike(ours: list[Tensor], stock: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, stock, strict=True))


def found_by(rank: int) -> dict[str, bool]:
    """Whether gradients of stock and of converted models are alike, and those of a rank by itself."""
    x = torch.randn(RANKS, 2, 3, 8, 8, generator=torch.Generator().manual_seed(1))[rank]
    stock = gradients(DistributedDataParallel(build()), x)
    found = {"alone": torch.allclose(gradients(build(), x)[0], stock[0], atol=1e-5)}
    for kind in ("exact", "recompute"):
        converted = convert(build(), x, recompute=kind == "recompute")
        found[kind] = are_alike(gradients(DistributedDataParallel(converted), x), stock)
    return found


@pytest.mark.slow
def test_gradients_are_averaged_as_stocks_are(tmp_path: Path):
    assert found_by_two(__file__, tmp_path) == [{"exact": True, "recompute": True, "alone": False}] * RANKS


if __name__ == "__main__":
    run_as_two(found_by)
