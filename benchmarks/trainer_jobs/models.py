"""A small CNN and a small GPT, whose losses are computed inside, as trainers want them; their data, and the plan."""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from autotune import Plan, Task, __version__
from autotune.measure.device import inspect_device
from autotune.plan import Budget, Environment
from autotune.techniques import Settings

__all__ = ["ACCUMULATE", "MICRO", "build_dataset", "build_model", "build_optimizer", "plan_of", "task_of"]

MICRO, ACCUMULATE = {"cnn": 32, "gpt": 8}, 2
_IMAGE, _WIDTH = 64, 16
_VOCABULARY, _LENGTH, _DEPTH = 256, 128, 4


class ConvBlock(nn.Module):
    """Convolution and ReLU, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(_WIDTH, _WIDTH, 3, padding=1), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width, height, width) in and out."""
        return x + self.relu(self.conv(x))


class Cnn(nn.Module):
    """Four blocks at one resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, _WIDTH, 3, padding=1)
        self.blocks = nn.Sequential(*(ConvBlock() for _ in range(_DEPTH)))
        self.head = nn.Linear(_WIDTH, 10)

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """(batch, 3, height, width) and (batch,) to the loss and (batch, 10)."""
        logits = self.head(self.blocks(self.stem(pixels)).mean((2, 3)))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class GptBlock(nn.Module):
    """Pre-norm causal attention of four heads, and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) in and out."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        change: Tensor = self.mlp(self.norm_2(x))
        return x + change


class Gpt(nn.Module):
    """Token and position embeddings, blocks, a linear head."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(_VOCABULARY, width), nn.Embedding(_LENGTH, width)
        self.blocks = nn.Sequential(*(GptBlock(width) for _ in range(_DEPTH)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, _VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """(batch, length) twice to the loss and (batch, length, vocabulary)."""
        logits = self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions.weight)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Samples(Dataset[dict[str, Tensor]]):
    """So many that no epoch ends while steps are timed; of 256 in memory."""

    def __init__(self, case: str) -> None:
        drawn = torch.Generator().manual_seed(0)
        if case == "cnn":
            self._inputs = torch.randn(256, 3, _IMAGE, _IMAGE, generator=drawn)
            self._labels = torch.randint(10, (256,), generator=drawn)
        else:
            tokens = torch.randint(_VOCABULARY, (256, _LENGTH + 1), generator=drawn)
            self._inputs, self._labels = tokens[:, :-1], tokens[:, 1:]
        self._name = "pixels" if case == "cnn" else "tokens"

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {self._name: self._inputs[index % 256], "labels": self._labels[index % 256]}


def build_model(case: str) -> nn.Module:
    """The case's."""
    return Cnn() if case == "cnn" else Gpt()


def build_dataset(case: str) -> Samples:
    """The case's."""
    return Samples(case)


def build_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Of every job."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def task_of(case: str, **changes: Any) -> Task:
    """The job as a task, for trainers that have no task of their own."""
    pieces: dict[str, Any] = {
        "build_model": lambda: build_model(case),
        "build_dataset": lambda: build_dataset(case),
        "compute_loss": lambda model, batch: model(**batch)["loss"],
        "build_optimizer": build_optimizer,
        "batch_size": MICRO[case] * ACCUMULATE,
    }
    return Task(**{**pieces, **changes})


def plan_of(case: str) -> Plan:
    """bf16, one block recomputed, memory-saving layers, two micro-batches to an optimizer step."""
    rows = {
        "batch": {"micro": MICRO[case], "accumulate": ACCUMULATE},
        "precision": {"kind": "bf16"},
        "checkpointing": {"kind": "chosen", "blocks": [1]},
        "layers": {"kind": "exact"},
    }
    here = Environment(
        torch=torch.__version__,
        device=inspect_device("cpu").name,
        autotune=__version__,
        python=platform.python_version(),
        threads=torch.get_num_threads(),
    )
    return Plan(settings=Settings.model_validate(rows), budget=Budget(device="cpu"), environment=here)
