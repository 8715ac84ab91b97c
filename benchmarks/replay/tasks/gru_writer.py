"""A stack of GRUs with residuals that writes Python's own source text, byte by byte."""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

LENGTH = 48
WIDTH = 192
MODULES = ["argparse", "ast", "configparser", "doctest", "inspect", "mailbox", "optparse", "pickle", "pydoc", "typing"]


class Stretches(Dataset[Tensor]):
    """Stretches of LENGTH + 1 bytes of the modules' texts, end to end."""

    def __init__(self) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        text = b"".join((folder / f"{name}.py").read_bytes() for name in MODULES)
        length = LENGTH + 1
        self.texts = torch.tensor(list(text[: len(text) // length * length])).view(-1, length)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Tensor:
        return self.texts[index]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(self.gru(self.norm(x))[0])
        return y


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build_model() -> nn.Module:
    return Writer()


def build_dataset() -> Dataset[Tensor]:
    return Stretches()


def compute_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
