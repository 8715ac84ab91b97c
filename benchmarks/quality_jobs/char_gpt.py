"""examples/char_gpt, narrower; of the modules that it is not trained on, two judge in the search, one is kept apart."""

import os
import runpy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "char_gpt" / "model.py"))
EXAMPLE["build_model"].__globals__.update(WIDTH=128, NUM_HEADS=4, SEQUENCE=64)  # the example's constants
build_model, build_dataset, compute_loss = (EXAMPLE[name] for name in ("build_model", "build_dataset", "compute_loss"))
batch_size = EXAMPLE["batch_size"]
JUDGED, HELD_OUT = ["heapq", "shutil"], ["random"]
weights = os.environ.get("QUALITY_WEIGHTS")
train_steps = 800
recovery_steps = 80


def build_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)


def scores(model: nn.Module, part: list[str]) -> Tensor:
    """Of each stretch of text, minus the mean loss of its characters."""
    model.eval()
    found = []
    with torch.no_grad():
        for texts in DataLoader(EXAMPLE["Windows"](part), 4 * batch_size):
            losses = nn.functional.cross_entropy(model(texts[:, :-1]).mT, texts[:, 1:], reduction="none")
            found.append(-losses.mean(1))
    return torch.cat(found)


def evaluate(model: nn.Module) -> Tensor:
    return scores(model, JUDGED)
