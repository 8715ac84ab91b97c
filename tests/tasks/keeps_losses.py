"""Prints, as each forward begins, whether the loss of the last one is still there; and how it stands after backward."""

import weakref

import torch
from torch import nn
from torch.utils.data import TensorDataset

batch_size = 4
_last = None


def build_model():
    return nn.Linear(1, 1)


def build_dataset():
    return TensorDataset(torch.linspace(0, 1, 64).reshape(64, 1))


def compute_loss(model, batch):
    global _last
    if _last is not None:
        print("kept" if _last() is not None else "gone")
    loss = model(batch[0]).square().mean()
    _last = weakref.ref(loss)
    return loss
