"""examples/char_gpt, narrower; of the modules that it is not trained on, two judge in the search, one is kept apart."""

import os
import runpy
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "char_gpt" / "model.py"))
EXAMPLE["build_model"].__globals__.update(WIDTH=128, NUM_HEADS=4, SEQUENCE=64)  # the example's constants
build_model, build_dataset, compute_loss = (EXAMPLE[name] for name in ("build_model", "build_dataset", "compute_loss"))
batch_size = EXAMPLE["batch_size"]
weights = os.environ.get("QUALITY_WEIGHTS")
train_steps = 800
recovery_steps = 80


def build_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)


def _minus_loss(model: nn.Module, modules: list[str]) -> float:
    model.eval()
    with torch.no_grad():
        losses = [
            compute_loss(model, batch) for batch in DataLoader(EXAMPLE["Windows"](modules), batch_size, drop_last=True)
        ]
    return -torch.stack(losses).mean().item()


def evaluate(model: nn.Module) -> float:
    """Minus the mean loss."""
    return _minus_loss(model, ["heapq", "shutil"])


def held_out(model: nn.Module) -> float:
    """The same of another module."""
    return _minus_loss(model, ["random"])
