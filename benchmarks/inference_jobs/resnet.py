"""A convolutional net of ResNet-18's shape, images of 64 pixels; random weights."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

batch_size = 8


def _conv(features: int, out: int, size: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(features, out, size, stride, size // 2, bias=False), nn.BatchNorm2d(out))


class Block(nn.Module):
    def __init__(self, features: int, out: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = _conv(features, out, 3, stride), _conv(out, out, 3, 1)
        self.skip = _conv(features, out, 1, stride) if stride > 1 else nn.Identity()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.second(self.relu(self.first(x))) + self.skip(x))


def build_model() -> nn.Module:
    stages = []
    for features, out in ((64, 64), (64, 128), (128, 256), (256, 512)):
        stages += [Block(features, out, 2 if out > 64 else 1), Block(out, out, 1)]
    stem = [_conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def build_dataset() -> TensorDataset:
    return TensorDataset(torch.randn(512, 3, 64, 64, generator=torch.Generator().manual_seed(0)))


def infer(model: nn.Module, batch: list[Tensor]) -> Tensor:
    outputs: Tensor = model(batch[0])
    return outputs
