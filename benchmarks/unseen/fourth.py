"""Models that were first run when the faults that those of ``third`` had shown were mended."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layer_models import Built
from .tokens import tokens


def _falcon() -> Built:
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(
        vocab_size=12_000, hidden_size=320, num_hidden_layers=5, num_attention_heads=5, ffn_hidden_size=1280,
        alibi=True, multi_query=True, parallel_attn=True,
    )  # fmt: skip
    words = tokens(12_000, 80)
    return FalconForCausalLM(config), {"input_ids": words, "labels": words}


def _electra() -> Built:
    from transformers import ElectraConfig, ElectraForTokenClassification

    config = ElectraConfig(
        vocab_size=16_000, embedding_size=128, hidden_size=256, num_hidden_layers=6, num_attention_heads=4,
        intermediate_size=1024, num_labels=9,
    )  # fmt: skip
    return ElectraForTokenClassification(config), {"input_ids": tokens(16_000, 96), "labels": tokens(9, 96)}


def _longformer() -> Built:
    from transformers import LongformerConfig, LongformerForSequenceClassification

    config = LongformerConfig(
        vocab_size=8000, hidden_size=192, num_hidden_layers=3, num_attention_heads=4, intermediate_size=768,
        attention_window=32, max_position_embeddings=300, num_labels=4,
    )  # fmt: skip
    texts = {"input_ids": 2 + tokens(7990, 128), "labels": torch.arange(8) % 4}
    return LongformerForSequenceClassification(config), texts


def _mae() -> Built:
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    config = ViTMAEConfig(
        image_size=96, patch_size=8, hidden_size=192, num_hidden_layers=4, num_attention_heads=4, intermediate_size=768,
        decoder_hidden_size=128, decoder_num_hidden_layers=2, decoder_num_attention_heads=4,
        decoder_intermediate_size=512,
    )  # fmt: skip
    return ViTMAEForPreTraining(config), {"pixel_values": torch.zeros(8, 3, 96, 96)}


def _levit() -> Built:
    from transformers import LevitConfig, LevitForImageClassification

    config = LevitConfig(image_size=96, hidden_sizes=[64, 96, 128], num_attention_heads=[4, 6, 8], num_labels=10)
    return LevitForImageClassification(config), {"pixel_values": torch.zeros(8, 3, 96, 96), "labels": torch.arange(8)}


class _Inception(nn.Module):
    """Four ways of different kernels, side by side."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = self._way(channels, 48, 1)
        self.three = nn.Sequential(self._way(channels, 32, 1), self._way(32, 64, 3))
        self.five = nn.Sequential(self._way(channels, 16, 1), self._way(16, 32, 5))
        self.seven = nn.Sequential(self._way(channels, 16, 1), self._way(16, 16, (1, 7)), self._way(16, 16, (7, 1)))
        self.pool = nn.Sequential(nn.AvgPool2d(3, 1, 1), self._way(channels, 16, 1))

    @staticmethod
    def _way(channels_in: int, channels: int, kernel: int | tuple[int, int]) -> nn.Module:
        conv = nn.Conv2d(channels_in, channels, kernel, padding="same", bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(channels), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([way(x) for way in (self.one, self.three, self.five, self.seven, self.pool)], 1)


class _Inceptions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 48, 7, 4, 3), nn.LocalResponseNorm(5), nn.ReLU())
        self.body = nn.Sequential(_Inception(48), _Inception(176), nn.MaxPool2d(3, 2, 1), _Inception(176))
        self.head = nn.Linear(176, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.body(self.stem(images)), 1).flatten(1)
        return F.cross_entropy(self.head(F.dropout(x, 0.2, self.training)), labels, label_smoothing=0.1)


def _inception() -> Built:
    return _Inceptions(), {"images": torch.zeros(8, 3, 112, 112), "labels": torch.arange(8) % 10}


class _SuperResolution(nn.Module):
    """Residual dense layers, and pixels shuffled into a larger image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 40, 5, padding=2)
        self.body = nn.ModuleList(
            nn.Sequential(nn.Conv2d(40, 80, 3, padding=1), nn.PReLU(80), nn.Conv2d(80, 40, 3, padding=1))
            for _ in range(5)
        )
        self.up = nn.Sequential(nn.Conv2d(40, 160, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(40, 1, 5, padding=2))

    def forward(self, small: Tensor, large: Tensor) -> Tensor:
        x = self.stem(small)
        for layer in self.body:
            x = x + 0.2 * layer(x)
        return F.l1_loss(self.up(x), large)


def _super_resolution() -> Built:
    return _SuperResolution(), {"small": torch.zeros(8, 1, 40, 40), "large": torch.zeros(8, 1, 80, 80)}


class _Detector(nn.Module):
    """One that says for each place of three pyramids' levels whether a thing is there, and how large."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 24, 48, 96, 160)
        self.levels = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(first, second, 3, 2, 1, bias=False), nn.BatchNorm2d(second), nn.SiLU(),
                nn.Conv2d(second, second, 3, 1, 1, groups=8, bias=False), nn.BatchNorm2d(second), nn.SiLU(),
            )
            for first, second in itertools.pairwise(widths)
        )  # fmt: skip
        self.across = nn.ModuleList(nn.Conv2d(width, 64, 1) for width in widths[2:])
        self.heads = nn.ModuleList(nn.Conv2d(64, 5, 3, padding=1) for _ in widths[2:])

    def forward(self, images: Tensor, there: Tensor, boxes: Tensor) -> Tensor:
        found, x = [], images
        for level in self.levels:
            x = level(x)
            found.append(x)
        top: Tensor | None = None
        total = images.new_zeros(())
        for across, head, x in zip(self.across, self.heads, found[1:], strict=True):
            y = across(x) if top is None else across(x) + F.interpolate(top, size=x.shape[2:], mode="nearest")
            top = y
            said = head(y).flatten(2).mean(2)
            total = total + F.binary_cross_entropy_with_logits(said[:, 0], there) + F.smooth_l1_loss(said[:, 1:], boxes)
        return total


def _detector() -> Built:
    return _Detector(), {"images": torch.zeros(8, 3, 128, 128), "there": torch.ones(8), "boxes": torch.zeros(8, 4)}


class _Conformer(nn.Module):
    """Attention, and a gated depthwise convolution along time, of mel spectra; a loss over frames."""

    def __init__(self, width: int = 144) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU())
        self.project = nn.Linear(32 * 20, width)
        self.blocks = nn.ModuleList(_ConformerBlock(width) for _ in range(4))
        self.head = nn.Linear(width, 128)

    def forward(self, mels: Tensor, labels: Tensor) -> Tensor:
        x = self.project(self.stem(mels[:, None]).transpose(1, 2).flatten(2))
        for block in self.blocks:
            x = block(x)
        return F.nll_loss(self.head(x).log_softmax(-1).flatten(0, 1), labels.flatten())


class _ConformerBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)
        )
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.before, self.after = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.along = nn.Conv1d(width, width, 15, padding=7, groups=width)
        self.batch = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.feed(x)
        y = self.norm_1(x)
        x = x + self.attend(y, y, y)[0]
        y = F.glu(self.before(self.norm_2(x).transpose(1, 2)), 1)
        return x + self.after(F.silu(self.batch(self.along(y)))).transpose(1, 2)


def _conformer() -> Built:
    return _Conformer(), {"mels": torch.zeros(8, 160, 80), "labels": tokens(128, 40)}


class _Field(nn.Module):
    """A radiance field: places in waves of many lengths, layers for each sample of each ray, and light added up."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(60, 128), nn.ReLU()]
        for _ in range(3):
            layers += [nn.Linear(128, 128), nn.ReLU()]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(128, 4)

    def forward(self, places: Tensor, light: Tensor) -> Tensor:
        waves = places[..., None] * (2.0 ** torch.arange(10)) * math.pi
        x = self.layers(torch.cat([waves.sin(), waves.cos()], -1).flatten(-2))
        color, density = self.head(x).split([3, 1], -1)
        opaque = 1 - (-F.softplus(density)).exp()
        passed = torch.cumprod(1 - opaque + 1e-6, 1)
        return F.mse_loss((color.sigmoid() * opaque * passed).sum(1), light)


def _field() -> Built:
    return _Field(), {"places": torch.zeros(8, 48, 3), "light": torch.zeros(8, 3)}


MODELS: dict[str, Callable[[], Built]] = {
    "falcon": _falcon,
    "electra": _electra,
    "longformer": _longformer,
    "vitmae": _mae,
    "levit": _levit,
    "inception": _inception,
    "super-resolution": _super_resolution,
    "detector": _detector,
    "conformer": _conformer,
    "field": _field,
}
IMAGES = ("inception", "super-resolution", "detector")
"""Those that are run with images in channels_last too."""
