"""Its dataset has no samples."""

import torch
from healthy import batch_size, build_model, compute_loss  # noqa: F401
from torch.utils.data import TensorDataset


def build_dataset():
    return TensorDataset(torch.empty(0, 4), torch.empty(0, 1))
