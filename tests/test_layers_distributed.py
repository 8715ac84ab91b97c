"""Converted models under DistributedDataParallel: two processes, and the gradients of both halves of a batch."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
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


def compare(rank: int, folder: str) -> None:
    """In each rank: gradients of stock and of converted models, in place of an assertion's message."""
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    x = torch.randn(RANKS, 2, 3, 8, 8, generator=torch.Generator().manual_seed(1))[rank]
    stock = gradients(DistributedDataParallel(build()), x)
    for recompute in (False, True):
        ours = gradients(DistributedDataParallel(convert(build(), x, recompute=recompute)), x)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, stock, strict=True))
    alone = gradients(build(), x)
    assert not torch.allclose(alone[0], stock[0], atol=1e-5), "the ranks' gradients were averaged"
    Path(folder, f"passed-{rank}").touch()
    dist.destroy_process_group()


def test_gradients_are_averaged_as_stocks_are(tmp_path: Path):
    mp.spawn(compare, (str(tmp_path),), RANKS)
    assert all((tmp_path / f"passed-{rank}").exists() for rank in range(RANKS))
