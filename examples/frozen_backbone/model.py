"""Transfer learning on a frozen backbone: a network that reads the digits 0 to 4 learns 5 to 9, by adapters alone.

The backbone's convolutions and norms stay as `python pretrain.py` left them. Behind each convolution a 1 by 1
convolution trains, and the head. What a frozen convolution reads, its backward does not need: torch keeps it anyway.

Source: Rebuffi et al. 2017, Learning multiple visual domains with residual adapters, arXiv:1705.08045.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

SIDE = 32
WIDTHS = (32, 64, 128)
NUM_CLASSES = 5
BACKBONE = Path(__file__).with_name("backbone.pt")

batch_size = 64  # what one optimizer step sees; a search holds it fixed


def read_digits(first: int) -> tuple[Tensor, Tensor]:
    """Images (count, 1, SIDE, SIDE) in [0, 1] of the digits from ``first`` on, and which of five each shows."""
    data = load_digits()
    chosen = (data.target >= first) & (data.target < first + NUM_CLASSES)
    images = torch.tensor(data.images[chosen], dtype=torch.float32).unsqueeze(1) / 16
    images = F.interpolate(images, size=SIDE, mode="bilinear", align_corners=False)
    return images, torch.tensor(data.target[chosen]) - first


def training_part(first: int) -> TensorDataset:
    """Four fifths; the rest is held out."""
    images, digits = read_digits(first)
    return TensorDataset(images[: len(images) * 4 // 5], digits[: len(images) * 4 // 5])


class Block(nn.Module):
    """Two convolutions, each with its norm, and half the side; with adapters once it is frozen."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(c, channels, 3, padding=1) for c in (channels_in, channels))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))
        self.adapters: nn.ModuleList | None = None

    def adapt(self) -> None:
        """Freeze it, and add adapters that change nothing yet."""
        self.requires_grad_(False).eval()
        self.adapters = nn.ModuleList(nn.Conv2d(conv.out_channels, conv.out_channels, 1) for conv in self.convolutions)
        for adapter in self.adapters:
            nn.init.zeros_(adapter.weight)
            nn.init.zeros_(adapter.bias)

    def forward(self, x: Tensor) -> Tensor:
        for number, (conv, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            x = conv(x)
            if self.adapters is not None:
                x = x + self.adapters[number](x)
            x = F.relu(norm(x))
        return F.max_pool2d(x, 2)


def build_reader() -> nn.Sequential:
    """The network as it is trained first."""
    blocks = [Block(*widths) for widths in zip((1, *WIDTHS), WIDTHS, strict=False)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(WIDTHS[-1] * (SIDE // 2 ** len(WIDTHS)) ** 2, NUM_CLASSES))


def build_model() -> nn.Module:
    if not BACKBONE.exists():
        raise FileNotFoundError(f"{BACKBONE.name} is not there: run `python pretrain.py` first")
    reader = build_reader()
    reader.load_state_dict(torch.load(BACKBONE))
    for block in reader[: len(WIDTHS)]:
        block.adapt()
    reader[-1].reset_parameters()
    return reader


def build_dataset() -> Dataset[tuple[Tensor, ...]]:
    return training_part(5)


def compute_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, digits = batch
    return F.cross_entropy(model(images), digits)


def build_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for one in parameters if one.requires_grad], lr=1e-3)


def evaluate(model: nn.Module) -> float:
    """Share of the held-out images, of digits from 5 on, that are read right."""
    images, digits = read_digits(5)
    held_out = len(images) * 4 // 5
    device = next(model.parameters()).device
    with torch.no_grad():
        read = torch.cat([model(batch.to(device)).argmax(1).cpu() for batch in images[held_out:].split(batch_size)])
    return (read == digits[held_out:]).float().mean().item()
