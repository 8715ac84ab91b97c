"""One faint pattern that makes a network read every handwritten digit as an 8: a task that optimizes its input.

The network is frozen; the only parameter that trains is the pattern. It is a fixed random convolutional network whose
last layer is fitted to scikit-learn's digits in closed form (ridge regression), so that building it takes no training.

Source: Moosavi-Dezfooli et al. 2017, Universal adversarial perturbations, arXiv:1610.08401.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

SIDE = 32
WIDTHS = (32, 64, 128)
NUM_TRAINED_ON = 1437  # four fifths; the rest is held out
LARGEST_CHANGE = 0.2  # of a pixel that goes from 0 to 1
TARGET = 8

batch_size = 64  # what one optimizer step sees; a search holds it fixed


def read_digits() -> tuple[Tensor, Tensor]:
    """Images (1797, 1, SIDE, SIDE) in [0, 1], scaled up from 8 by 8, and their digits."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return F.interpolate(images, size=SIDE, mode="bilinear", align_corners=False), torch.tensor(digits.target)


def build_reader() -> nn.Sequential:
    """A frozen network that reads digits."""
    layers: list[nn.Module] = []
    for channels_in, channels in zip((1, *WIDTHS), WIDTHS, strict=False):
        layers += [nn.Conv2d(channels_in, channels, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)]
    features = nn.Sequential(*layers, nn.Flatten(), nn.Linear(WIDTHS[-1] * (SIDE // 2 ** len(WIDTHS)) ** 2, 10))
    images, digits = (tensor[:NUM_TRAINED_ON] for tensor in read_digits())
    with torch.no_grad():
        for layer in features:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight)
        x = torch.cat([features[:-1](batch) for batch in images.split(batch_size)])
        scale = x.std()
        gram = x @ x.T + 1e-2 * len(x) * scale**2 * torch.eye(len(x))
        wanted = F.one_hot(digits, 10).float() - 0.1
        features[-1].weight.copy_(20 * (x.T @ torch.linalg.solve(gram, wanted)).T)
        features[-1].bias.zero_()
    return features.requires_grad_(False)


class Perturbed(nn.Module):
    """The frozen reader behind one pattern that is added to every image."""

    def __init__(self, reader: nn.Module) -> None:
        super().__init__()
        self.reader = reader
        self.pattern = nn.Parameter(torch.zeros(1, SIDE, SIDE))

    def forward(self, images: Tensor) -> Tensor:
        return self.reader(images + LARGEST_CHANGE * torch.tanh(self.pattern))


def build_model() -> nn.Module:
    return Perturbed(build_reader())


def build_dataset() -> Dataset[tuple[Tensor, ...]]:
    return TensorDataset(read_digits()[0][:NUM_TRAINED_ON])


def compute_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits, torch.full((len(logits),), TARGET, device=logits.device))


def build_optimizer(model: Perturbed) -> torch.optim.Optimizer:
    return torch.optim.Adam([model.pattern], lr=0.05)


def evaluate(model: nn.Module) -> float:
    """Share of the held-out images, none of them an 8, that are read as one."""
    images, digits = (tensor[NUM_TRAINED_ON:] for tensor in read_digits())
    device = next(model.parameters()).device
    with torch.no_grad():
        batches = images[digits != TARGET].split(batch_size)
        found = torch.cat([model(batch.to(device)).argmax(1).cpu() for batch in batches])
    return (found == TARGET).float().mean().item()
