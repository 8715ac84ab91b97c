"""A multilayer perceptron that reads scikit-learn's handwritten digits."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

WIDTH = 512

batch_size = 128


def build_model() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(4)]
    return nn.Sequential(nn.Linear(64, WIDTH), *blocks, nn.Linear(WIDTH, 10))


def build_dataset() -> Dataset[tuple[Tensor, ...]]:
    digits = load_digits()
    return TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))


def compute_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, digits = batch
    return nn.functional.cross_entropy(model(images), digits)
