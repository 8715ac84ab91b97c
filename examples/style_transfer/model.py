"""One photograph in the manner of another: neural style transfer, where the picture is all that trains.

The network is frozen and random: statistics of random convolutions describe a style, too. A step looks at a batch of
the picture's crops, so that a picture of any size is trained within a budget. Photographs are scikit-learn's.

Sources: Gatys et al. 2015, A neural algorithm of artistic style, arXiv:1508.06576; Ustyuzhaninov et al. 2016, Texture
synthesis using shallow convolutional networks with random filters, arXiv:1606.00021.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

SIDE = 64  # of a crop
WIDTHS = (32, 64, 128)
STYLE_WEIGHT = 10.0

batch_size = 16  # crops that one optimizer step sees; a search holds it fixed


def read_photographs() -> list[Tensor]:
    """A temple and a flower, (3, 213, 320) each, in [0, 1]."""
    photographs = (torch.tensor(image).permute(2, 0, 1) / 255 for image in load_sample_images().images)
    return [F.avg_pool2d(photograph, 2) for photograph in photographs]


def corners_of(picture: Tensor) -> Tensor:
    """Of crops that overlap, (count, 2)."""
    rows, columns = (torch.arange(0, size - SIDE + 1, 8) for size in picture.shape[1:])
    return torch.cartesian_prod(rows, columns)


def crops_at(picture: Tensor, corners: Tensor) -> Tensor:
    """(count, 3, SIDE, SIDE)."""
    return torch.stack([picture[:, row : row + SIDE, column : column + SIDE] for row, column in corners.tolist()])


def gram(features: Tensor) -> Tensor:
    """Which channels go together in each crop, wherever in it: (count, channels, channels)."""
    flat = features.flatten(2)
    return flat @ flat.mT / flat.shape[2]


class Block(nn.Module):
    """Two convolutions, and half the side."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)
        )
        for layer in self.convolutions[::2]:
            nn.init.kaiming_normal_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(F.relu(self.convolutions(x)), 2)


class Stylized(nn.Module):
    """A picture that trains, and the frozen network that looks at it."""

    def __init__(self, content: Tensor, style: Tensor) -> None:
        super().__init__()
        widths = zip((3, *WIDTHS), WIDTHS, strict=False)
        self.blocks = nn.ModuleList(Block(*pair) for pair in widths).requires_grad_(False)
        self.picture = nn.Parameter(content.clone())
        self.register_buffer("content", content)
        with torch.no_grad():
            for number, features in enumerate(self(crops_at(style, corners_of(style)))):
                self.register_buffer(f"style{number}", gram(features).mean(0))

    def forward(self, crops: Tensor) -> list[Tensor]:
        """What each block makes of them."""
        found = []
        for block in self.blocks:
            crops = block(crops)
            found.append(crops)
        return found


def build_model() -> nn.Module:
    return Stylized(*read_photographs())


def build_dataset() -> Dataset[tuple[Tensor, ...]]:
    return TensorDataset(corners_of(read_photographs()[0]))


def style_distance(model: Stylized, features: list[Tensor]) -> Tensor:
    styles = [getattr(model, f"style{number}") for number in range(len(features))]
    return sum(
        ((gram(one) - style) ** 2).mean() / (style**2).mean() for one, style in zip(features, styles, strict=True)
    )


def compute_loss(model: Stylized, batch: list[Tensor]) -> Tensor:
    features = model(crops_at(model.picture, batch[0]))
    with torch.no_grad():
        wanted = model(crops_at(model.content, batch[0]))[-1]
    return F.mse_loss(features[-1], wanted) + STYLE_WEIGHT * style_distance(model, features)


def build_optimizer(model: Stylized) -> torch.optim.Optimizer:
    return torch.optim.Adam([model.picture], lr=0.02)


def evaluate(model: Stylized) -> float:
    """Share of the distance from the photograph's style to the flower's that is gone."""
    with torch.no_grad():
        corners = corners_of(model.content)[::8]
        after, before = (style_distance(model, model(crops_at(one, corners))) for one in (model.picture, model.content))
    return (1 - after / before).item()
