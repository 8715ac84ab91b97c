"""A U-Net that takes noise off scikit-learn's handwritten digits: 1797 real images, inside the package."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset

SIDE = 48
NOISE = 0.3
WIDTHS = (16, 32, 64)


def two_convolutions(channels_in: int, channels: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in (channels_in, channels):
        layers += [nn.Conv2d(size, channels, 3, padding=1), nn.GroupNorm(8, channels), nn.SiLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Ronneberger et al. 2015, arXiv:1505.04597, with GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(two_convolutions(a, b) for a, b in pairwise((1, *WIDTHS)))
        self.up = nn.ModuleList(two_convolutions(a + b, a) for a, b in pairwise(WIDTHS))
        self.head = nn.Conv2d(WIDTHS[0], 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        passed = []
        for level in self.down:
            x = level(F.avg_pool2d(x, 2) if passed else x)
            passed.append(x)
        for level, other in zip(reversed(self.up), reversed(passed[:-1]), strict=True):
            x = level(torch.cat([F.interpolate(x, scale_factor=2, mode="nearest"), other], 1))
        noise: Tensor = self.head(x)
        return noise


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """A digit (1, SIDE, SIDE) with noise, and the noise."""

    def __init__(self) -> None:
        digits = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
        self.images = F.interpolate(digits, size=SIDE, mode="bilinear", align_corners=False)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = NOISE * torch.randn(1, SIDE, SIDE)
        return self.images[index] + noise, noise


def build_model() -> nn.Module:
    return UNet()


def build_dataset() -> Dataset[tuple[Tensor, Tensor]]:
    return Noisy()


def compute_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, noise = batch
    return F.mse_loss(model(images), noise)
