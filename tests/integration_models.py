"""A small CNN and a small GPT-2, built from configuration, as tasks and as what a Trainer takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from autotune import Task

SAMPLES, LEARNING_RATE = 24, 0.05


class Images(Dataset):
    """Fixed images of noise with labels."""

    def __init__(self) -> None:
        drawn = torch.Generator().manual_seed(1)
        self.images = torch.randn(SAMPLES, 3, 8, 8, generator=drawn)
        self.labels = torch.randint(0, 4, (SAMPLES,), generator=drawn)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixels": self.images[index], "labels": self.labels[index]}


class Numbered(Images):
    """The same, with the number of each."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "index": index}


class Block(nn.Module):
    """A convolution whose activation a memory-saving layer keeps as bits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.relu(self.conv(x))


class Cnn(nn.Module):
    """Its loss is computed inside, as a Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(8, 4)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        logits = self.head(self.blocks(self.stem(pixels)).mean((2, 3)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Tokens(Dataset):
    """Fixed tokens, of which a varying number is masked out of the loss."""

    def __init__(self) -> None:
        self.tokens = torch.randint(0, 64, (SAMPLES, 16), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        labels = self.tokens[index].clone()
        labels[: index % 7] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


def build_cnn() -> nn.Module:
    torch.manual_seed(0)
    return Cnn()


def build_gpt() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    size = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 4, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def mean_loss(model: nn.Module, batch: Any) -> Any:
    """As a loop of one's own has it."""
    return model(**batch)["loss"]


def gpt_loss(model: nn.Module, batch: Any) -> Any:
    """As (loss_sum, count), by all labels of the step, the first of a row too, as a Trainer counts for GPT-2."""
    count = batch["labels"].ne(-100).sum()
    return model(**batch, num_items_in_batch=torch.ones(()))["loss"], count


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)


BUILD = {"cnn": build_cnn, "gpt": build_gpt}
DATA = {"cnn": Images, "gpt": Tokens}
LOSS = {"cnn": mean_loss, "gpt": gpt_loss}


def task_of(kind: str, **changes: Any) -> Task:
    """In the dataset's own order."""

    def build_model() -> nn.Module:
        return BUILD[kind]().train()

    pieces = {
        "compute_loss": LOSS[kind],
        "build_optimizer": adamw,
        "build_sampler": lambda data: torch.utils.data.SequentialSampler(data),
    }
    return Task(build_model=build_model, build_dataset=DATA[kind], **pieces | changes)
