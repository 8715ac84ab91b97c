"""A small ResNet with BatchNorm on scikit-learn's handwritten digits: 1797 real images, inside the package."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

SIDE = 32
NUM_TRAINED_ON = 1437  # four fifths; the rest is held out

batch_size = 64  # what one optimizer step sees; a search holds it fixed


def read_digits() -> tuple[Tensor, Tensor]:
    """Images (1797, 1, SIDE, SIDE) in [0, 1], scaled up from 8 by 8, and their digits."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return F.interpolate(images, size=SIDE, mode="bilinear", align_corners=False), torch.tensor(digits.target)


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.conv_2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        same = stride == 1 and channels_in == channels
        self.around = nn.Identity() if same else nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_2(self.conv_2(F.relu(self.norm_1(self.conv_1(x)))))
        return F.relu(y + self.around(x))


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.Sequential(Block(32, 32, 1), Block(32, 64, 2), Block(64, 64, 1), Block(64, 128, 2), Block(128, 128, 1)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def build_dataset() -> Dataset[tuple[Tensor, ...]]:
    images, digits = read_digits()
    return TensorDataset(images[:NUM_TRAINED_ON], digits[:NUM_TRAINED_ON])


def compute_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, digits = batch
    return F.cross_entropy(model(images), digits)


def build_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=5e-4, weight_decay=0.01)


def evaluate(model: nn.Module) -> float:
    """Share of the held-out images that are read right."""
    images, digits = (tensor[NUM_TRAINED_ON:].split(batch_size) for tensor in read_digits())
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(batch.to(device)).argmax(1).cpu() for batch in images])
    model.train(training)
    return (found == torch.cat(digits)).float().mean().item()
