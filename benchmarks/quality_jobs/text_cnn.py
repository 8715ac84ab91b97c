"""Convolutions over bytes that tell five kinds of file apart: Python, Cython, C++, YAML and reStructuredText.

All are files that Python, torch and scikit-learn install, read in the order of their names: of each kind its first
4,000 stretches of 96 bytes, of which 2,800 train, 600 judge, and 600 are kept apart.
"""

import functools
import importlib.util
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

LENGTH, WIDTH, KINDS = 96, 128, 5
TRAINED, JUDGED, HELD_OUT = slice(0, 2800), slice(2800, 3400), slice(3400, 4000)

batch_size = 64
weights = os.environ.get("QUALITY_WEIGHTS")
train_steps = 600
recovery_steps = 60


def installed(package: str) -> Path:
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def joined(paths: Iterable[Path]) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(paths))


@functools.cache
def read_texts() -> Tensor:
    """Bytes (5, 4000, 96), by kind."""
    texts = [
        joined(Path(sysconfig.get_path("stdlib")).glob("*.py")),
        joined(installed("sklearn").rglob("*.pyx")),
        joined((installed("torch") / "include" / "c10").rglob("*.h")),
        (installed("torchgen") / "packaged" / "ATen" / "native" / "native_functions.yaml").read_bytes(),
        "".join(topics[name] for name in sorted(topics)).encode(),
    ]
    number = HELD_OUT.stop * LENGTH
    return torch.stack([torch.frombuffer(bytearray(text[:number]), dtype=torch.uint8) for text in texts]).view(
        KINDS, -1, LENGTH
    )


class TextCNN(nn.Module):
    """Three convolutions of five bytes, two of them with a pooling; the largest of each channel over the text."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.convolutions = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 5, padding=2) for _ in range(3))
        self.head = nn.Linear(WIDTH, KINDS)

    def forward(self, text: Tensor) -> Tensor:
        first, second, third = self.convolutions
        x = self.embedding(text).transpose(1, 2)
        x = nn.functional.max_pool1d(torch.relu(first(x)), 2)
        x = nn.functional.max_pool1d(torch.relu(second(x)), 2)
        logits: Tensor = self.head(torch.relu(third(x)).amax(-1))
        return logits


def build_model() -> nn.Module:
    return TextCNN()


def of_part(part: slice) -> tuple[Tensor, Tensor]:
    texts = read_texts()[:, part].flatten(0, 1).long()
    return texts, torch.arange(KINDS).repeat_interleave(len(texts) // KINDS)


def build_dataset() -> TensorDataset:
    return TensorDataset(*of_part(TRAINED))


def compute_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    texts, kinds = batch
    return nn.functional.cross_entropy(model(texts), kinds)


def build_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)


def scores(model: nn.Module, part: slice) -> Tensor:
    """Of each stretch, whether its kind is read right."""
    texts, kinds = of_part(part)
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(some).argmax(1) for some in texts.split(200)])
    return (found == kinds).float()


def evaluate(model: nn.Module) -> Tensor:
    return scores(model, JUDGED)
