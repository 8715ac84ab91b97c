"""A small model that each kind of technique can be tried on: it has convolutions, a frozen block, a large table,
feed-forward parts, and reversible blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from autotune.task import Task
from autotune.testing.models import GptBlock
from autotune.testing.zoo import BATCH_SIZE, NUM_SAMPLES

_NUM_WORDS, _WIDTH, _NUM_CLASSES = 10_000, 128, 3
"""As many rows, features and bytes as techniques ask for by themselves."""


class Coupled(nn.Module):
    """A reversible block of two feed-forward parts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.f, self.g = (
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(2)
        )

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        """Two streams (batch, length, width) in and out."""
        y1 = x1 + self.f(x2)
        return y1, x2 + self.g(y1)


class Everything(nn.Module):
    """An image in 16 patches, with the mean of some words added to each; the first block is frozen."""

    def __init__(self, width: int = _WIDTH) -> None:
        super().__init__()
        self.words = nn.Embedding(_NUM_WORDS, width)
        self.patches = nn.Conv2d(3, width, 2, stride=2)
        self.blocks = nn.ModuleList(GptBlock(width, 0.0) for _ in range(3))
        self.pairs = nn.ModuleList(Coupled(width // 2) for _ in range(2))
        self.head = nn.Linear(width, _NUM_CLASSES)
        self.blocks[0].requires_grad_(False)

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        """(batch, 3, 8, 8) and (batch, words) of ids to (batch, classes)."""
        x = self.patches(image).flatten(2).transpose(1, 2) + self.words(words).mean(1, keepdim=True)
        for block in self.blocks:
            x = block(x)
        streams = x.chunk(2, -1)
        for pair in self.pairs:
            streams = pair(*streams)
        scores: Tensor = self.head(torch.cat(streams, -1).mean(1))
        return scores


def _samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(NUM_SAMPLES, 3, 8, 8, generator=generator)
    words = torch.randint(0, _NUM_WORDS, (NUM_SAMPLES, 6), generator=generator)
    return TensorDataset(images, words, images.mean((2, 3)).argmax(1))


def _loss(model: nn.Module, batch: Any) -> Tensor:
    images, words, labels = batch
    return F.cross_entropy(model(images, words), labels)


def everything(build_optimizer: Any) -> Task:
    """The job; an epoch of it takes hundredths of a second."""
    return Task(
        Everything,
        _samples,
        _loss,
        batch_size=BATCH_SIZE,
        build_optimizer=build_optimizer,
        blocks=["blocks"],
        reversible_blocks=["pairs"],
        variants={"narrow": partial(Everything, width=_WIDTH // 2)},
    )
