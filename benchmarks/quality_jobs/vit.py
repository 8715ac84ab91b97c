"""A ViT of transformers on the same images, split as in vgg.py."""

import os
import runpy
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import ViTConfig, ViTForImageClassification

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "digits_cnn" / "model.py"))
weights = os.environ.get("QUALITY_WEIGHTS")
batch_size = 64
train_steps = 600
recovery_steps = 100
IMAGES, DIGITS = EXAMPLE["read_digits"]()
TRAINED, JUDGED, HELD_OUT = slice(0, 1077), slice(1077, 1437), slice(1437, None)


def build_model() -> nn.Module:
    config = ViTConfig(
        image_size=32, patch_size=8, num_channels=1, hidden_size=128, num_hidden_layers=4, num_attention_heads=8,
        intermediate_size=512, num_labels=10,
    )  # fmt: skip
    return ViTForImageClassification(config)


def build_dataset() -> TensorDataset:
    return TensorDataset(IMAGES[TRAINED], DIGITS[TRAINED])


def compute_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, digits = batch
    return F.cross_entropy(model(pixel_values=images).logits, digits)


def build_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=5e-4, weight_decay=0.01)


def scores(model: nn.Module, part: slice) -> Tensor:
    """Of each image, whether it is read right."""
    model.eval()
    with torch.no_grad():
        found = [model(pixel_values=images).logits.argmax(1) for images in IMAGES[part].split(batch_size)]
    return (torch.cat(found) == DIGITS[part]).float()


def evaluate(model: nn.Module) -> Tensor:
    return scores(model, JUDGED)
