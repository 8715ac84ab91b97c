"""A task whose measurements can be held: each leaves `begun-PID` and waits for `go` or `go-PID`."""

from __future__ import annotations

HELD = '''
"""{name}: each measurement says that it has begun, and waits until it may go on."""

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

batch_size = 8
folder = Path({folder!r})
num_losses = 0


def build_model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def build_dataset():
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def compute_loss(model, batch):
    global num_losses
    inputs, targets = batch
    num_losses += type(inputs) is torch.Tensor  # a prediction's are not
    if num_losses == 30:  # an inspection has fewer
        (folder / f"begun-{{os.getpid()}}").touch()
        while not any((folder / go).exists() for go in ("go", f"go-{{os.getpid()}}")):
            time.sleep(0.02)
    return nn.functional.mse_loss(model(inputs), targets)
'''
"""The text of a file, to be formatted with a ``name`` that tells it from others, and the ``folder`` of the signs."""
