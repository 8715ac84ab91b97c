"""Six convolutions with BatchNorm on the images of examples/digits_cnn: trained on 1077, judged by 360 and by others.

Source: Simonyan and Zisserman 2015, arXiv:1409.1556.
"""

import os
import runpy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "digits_cnn" / "model.py"))
compute_loss = EXAMPLE["compute_loss"]
IMAGES, DIGITS = EXAMPLE["read_digits"]()
TRAINED, JUDGED, HELD_OUT = slice(0, 1077), slice(1077, 1437), slice(1437, None)
WIDTHS = (32, 32, 64, 64, 128, 128)

batch_size = 32
weights = os.environ.get("QUALITY_WEIGHTS")
train_steps = 300
recovery_steps = 60


def build_model() -> nn.Module:
    layers: list[nn.Module] = []
    for number, (width_in, width) in enumerate(zip((1, *WIDTHS), WIDTHS, strict=False)):
        layers += [nn.Conv2d(width_in, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if number % 2 else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[-1], 10))


def build_dataset() -> TensorDataset:
    return TensorDataset(IMAGES[TRAINED], DIGITS[TRAINED])


def build_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)


def scores(model: nn.Module, part: slice) -> Tensor:
    """Of each image, whether it is read right."""
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(images).argmax(1) for images in IMAGES[part].split(batch_size)])
    return (found == DIGITS[part]).float()


def evaluate(model: nn.Module) -> Tensor:
    return scores(model, JUDGED)
