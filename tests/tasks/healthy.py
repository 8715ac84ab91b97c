"""A small task that does everything right."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

batch_size = 8


def build_model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def build_dataset():
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def compute_loss(model, batch):
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)
