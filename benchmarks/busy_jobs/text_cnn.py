"""Convolutions over text that tell from which of Python's own modules a stretch of source is.

Source: Kim 2014, Convolutional neural networks for sentence classification, arXiv:1408.5882.
"""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

LENGTH, WIDTH = 96, 96
MODULES = ["argparse", "ast", "configparser", "doctest", "inspect", "mailbox", "optparse", "pickle", "pydoc", "typing"]

batch_size = 64


class TextCNN(nn.Module):
    """Convolutions of three widths, the largest of each over the text."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.convolutions = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, size) for size in (3, 5, 7))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(3 * WIDTH, len(MODULES))

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text).transpose(1, 2)
        found = [torch.relu(convolution(x)).amax(-1) for convolution in self.convolutions]
        logits: Tensor = self.head(self.drop(torch.cat(found, -1)))
        return logits


def build_model() -> nn.Module:
    return TextCNN()


def build_dataset() -> Dataset[tuple[Tensor, ...]]:
    folder = Path(sysconfig.get_path("stdlib"))
    texts = [torch.tensor(list((folder / f"{name}.py").read_bytes())) for name in MODULES]
    rows = [text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH) for text in texts]
    modules = [torch.full((len(row),), number) for number, row in enumerate(rows)]
    return TensorDataset(torch.cat(rows), torch.cat(modules))


def compute_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    text, modules = batch
    return nn.functional.cross_entropy(model(text), modules)
