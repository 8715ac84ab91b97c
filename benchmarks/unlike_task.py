"""A training whose samples take as long as the environment says, so that two processes are as unlike as they are to
be."""

from __future__ import annotations

import os
import time

import torch
from torch import nn

SAMPLE_S = "UNLIKE_SAMPLE_S"
"""The variable: seconds that a sample sleeps."""
STEPS = 8
"""Optimizer steps in an epoch."""

batch_size = 48


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))


def build_dataset() -> torch.Tensor:
    return torch.randn(batch_size * STEPS, 16, generator=torch.Generator().manual_seed(0))


def compute_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    time.sleep(float(os.environ[SAMPLE_S]) * len(batch))
    return model(batch).square().mean()
