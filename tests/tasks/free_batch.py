"""64 MiB of parameters, 8 MiB of activations a sample, and no batch size: the batch is free."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


def build_model():
    return nn.Linear(4096, 4096, bias=False)


def build_dataset():
    return TensorDataset(torch.ones(64, 4096))


def compute_loss(model, batch):
    x = model(batch[0]).repeat(1, 128)
    for _ in range(4):
        x = torch.tanh(x)
    return x.square().mean()


def build_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=1e-3)
