"""examples/digits_cnn, trained on 797 images; 500 judge in the search, and 500 are kept from it."""

import os
import runpy
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "digits_cnn" / "model.py"))
build_model, build_optimizer, compute_loss = (
    EXAMPLE[name] for name in ("build_model", "build_optimizer", "compute_loss")
)
batch_size = EXAMPLE["batch_size"]
weights = os.environ.get("QUALITY_WEIGHTS")
train_steps = 300
recovery_steps = 100
IMAGES, DIGITS = EXAMPLE["read_digits"]()
TRAINED, JUDGED = slice(0, 797), slice(797, 1297)
HELD_OUT = slice(1297, None)


def build_dataset() -> TensorDataset:
    return TensorDataset(IMAGES[TRAINED], DIGITS[TRAINED])


def _read_right(model: nn.Module, part: slice) -> float:
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(images).argmax(1) for images in IMAGES[part].split(batch_size)])
    return (found == DIGITS[part]).float().mean().item()


def evaluate(model: nn.Module) -> float:
    """Share of the images that are read right."""
    return _read_right(model, JUDGED)


def held_out(model: nn.Module) -> float:
    """The same of others."""
    return _read_right(model, HELD_OUT)
