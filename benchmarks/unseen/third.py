"""Models that were first run when the faults that those of ``second`` had shown were mended."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layer_models import Built
from .tokens import tokens


def _gemma() -> Built:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=16_000, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, sliding_window=32,
    )  # fmt: skip
    words = tokens(16_000, 64)
    return Gemma2ForCausalLM(config), {"input_ids": words, "labels": words}


def _albert() -> Built:
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(
        vocab_size=16_000, embedding_size=128, hidden_size=384, num_hidden_layers=6, num_attention_heads=6,
        intermediate_size=1536,
    )  # fmt: skip
    words = tokens(16_000, 64)
    return AlbertForMaskedLM(config), {"input_ids": words, "labels": words}


def _bart() -> Built:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=8000, d_model=256, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=1024, decoder_ffn_dim=1024, max_position_embeddings=128,
    )  # fmt: skip
    texts = {"input_ids": tokens(8000, 96), "attention_mask": torch.ones(8, 96, dtype=torch.long)}
    return BartForConditionalGeneration(config), texts | {"labels": tokens(8000, 48)}


def _fnet() -> Built:
    from transformers import FNetConfig, FNetForMaskedLM

    config = FNetConfig(vocab_size=8000, hidden_size=256, num_hidden_layers=6, intermediate_size=1024)
    words = tokens(8000, 64)
    return FNetForMaskedLM(config), {"input_ids": words, "labels": words}


def _poolformer() -> Built:
    from transformers import PoolFormerConfig, PoolFormerForImageClassification

    config = PoolFormerConfig(depths=[2, 2, 4, 2], hidden_sizes=[32, 64, 128, 256], num_labels=10)
    images = {"pixel_values": torch.zeros(8, 3, 96, 96), "labels": torch.arange(8) % 10}
    return PoolFormerForImageClassification(config), images


def _videos() -> Built:
    from transformers import VideoMAEConfig, VideoMAEForVideoClassification

    config = VideoMAEConfig(
        image_size=64, patch_size=16, num_frames=8, hidden_size=192, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=768, num_labels=10,
    )  # fmt: skip
    videos = {"pixel_values": torch.zeros(8, 8, 3, 64, 64), "labels": torch.arange(8) % 10}
    return VideoMAEForVideoClassification(config), videos


def _series() -> Built:
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    config = PatchTSTConfig(
        num_input_channels=7, context_length=256, patch_length=16, patch_stride=8, prediction_length=64, d_model=96,
        num_attention_heads=4, num_hidden_layers=3, ffn_dim=256,
    )  # fmt: skip
    past = torch.arange(8.0 * 256 * 7).reshape(8, 256, 7).sin()
    return PatchTSTForPrediction(config), {"past_values": past, "future_values": past[:, :64].clone()}


class _Autoencoder(nn.Module):
    """A variational autoencoder of convolutions, with a draw between its halves."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128)
        down = [
            nn.Sequential(nn.Conv2d(first, second, 4, 2, 1), nn.GroupNorm(8, second), nn.SiLU())
            for first, second in itertools.pairwise(widths)
        ]
        up = [
            nn.Sequential(nn.ConvTranspose2d(first, second, 4, 2, 1), nn.GroupNorm(8, second), nn.SiLU())
            for first, second in ((64, 64), (64, 32))
        ]
        self.down = nn.Sequential(*down, nn.Conv2d(128, 128, 3, padding=1))
        self.up = nn.Sequential(*up, nn.ConvTranspose2d(32, 3, 4, 2, 1))

    def forward(self, images: Tensor) -> Tensor:
        mean, log_variance = self.down(images).chunk(2, 1)
        drawn = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        away = (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        return F.mse_loss(self.up(drawn), images) + 1e-3 * away


def _autoencoder() -> Built:
    return _Autoencoder(), {"images": torch.zeros(8, 3, 96, 96)}


class _Shuffled(nn.Module):
    """A unit of a ShuffleNet: half of the channels go around, and then the halves are mixed."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.way = nn.Sequential(
            nn.Conv2d(half, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU(inplace=True),
            nn.Conv2d(half, half, 3, 1, 1, groups=half, bias=False), nn.BatchNorm2d(half),
            nn.Conv2d(half, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        around, through = x.chunk(2, 1)
        y = torch.cat([around, self.way(through)], 1)
        return y.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


class _ShuffleNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 48, 3, 2, 1, bias=False), nn.BatchNorm2d(48), nn.ReLU(inplace=True)]
        for channels in (48, 96, 192):
            layers += [*(_Shuffled(channels) for _ in range(3)), nn.Conv2d(channels, 2 * channels, 1), nn.MaxPool2d(2)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(384, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(images).mean((2, 3))), labels)


def _shufflenet() -> Built:
    return _ShuffleNet(), {"images": torch.zeros(8, 3, 96, 96), "labels": torch.arange(8) % 10}


class _Graphs(nn.Module):
    """Messages along the edges of graphs, added up where they arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 96)
        self.messages = nn.ModuleList(nn.Linear(192, 96) for _ in range(4))
        self.updates = nn.ModuleList(nn.GRUCell(96, 96) for _ in range(4))
        self.head = nn.Linear(96, 2)

    def forward(self, nodes: Tensor, sources: Tensor, targets: Tensor, labels: Tensor) -> Tensor:
        batch, num_nodes = nodes.shape
        first = torch.arange(batch)[:, None] * num_nodes
        start, end = (sources + first).flatten(), (targets + first).flatten()
        x = self.embed(nodes).flatten(0, 1)
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = message(torch.cat([x[start], x[end]], -1)).relu()
            x = update(torch.zeros_like(x).index_add(0, end, sent.to(x.dtype)), x)
        return F.cross_entropy(self.head(x.unflatten(0, (batch, -1)).mean(1)), labels)


def _graphs() -> Built:
    edges = tokens(64, 256)
    graphs = {"nodes": tokens(32, 64), "sources": edges, "targets": edges.flip(1), "labels": torch.arange(8) % 2}
    return _Graphs(), graphs


class _Denoiser(nn.Module):
    """A U-Net that is told the time, with attention at its bottom, as diffusion has it."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 128))
        self.stem = nn.Conv2d(3, 64, 3, padding=1)
        self.down_1, self.down_2 = _Residual(64, 64), _Residual(64, 128)
        self.bottom_1, self.bottom_2 = _Residual(128, 128), _Residual(128, 128)
        self.norm, self.attend = nn.GroupNorm(8, 128), nn.MultiheadAttention(128, 4, batch_first=True)
        self.up_2, self.up_1 = _Residual(256, 64), _Residual(128, 64)
        self.head = nn.Sequential(nn.GroupNorm(8, 64), nn.SiLU(), nn.Conv2d(64, 3, 3, padding=1))

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        angles = times[:, None] * torch.arange(32).div(-4).exp()
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        first = self.down_1(self.stem(images), time)
        second = self.down_2(F.avg_pool2d(first, 2), time)
        x = self.bottom_1(F.avg_pool2d(second, 2), time)
        y = self.norm(x).flatten(2).transpose(1, 2)
        x = x + self.attend(y, y, y, need_weights=False)[0].transpose(1, 2).unflatten(2, x.shape[2:])
        x = F.interpolate(self.bottom_2(x, time), scale_factor=2.0)
        x = F.interpolate(self.up_2(torch.cat([x, second], 1), time), scale_factor=2.0)
        return F.mse_loss(self.head(self.up_1(torch.cat([x, first], 1), time)), images)


class _Residual(nn.Module):
    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.GroupNorm(8, channels_in), nn.GroupNorm(8, channels)
        self.conv_1 = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.conv_2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(128, channels)
        self.around = nn.Conv2d(channels_in, channels, 1) if channels_in != channels else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv_1(F.silu(self.norm_1(x))) + self.time(time)[:, :, None, None]
        z: Tensor = self.conv_2(F.silu(self.norm_2(y))) + self.around(x)
        return z


def _denoiser() -> Built:
    return _Denoiser(), {"images": torch.zeros(8, 3, 32, 32), "times": torch.linspace(0, 1, 8)}


MODELS: dict[str, Callable[[], Built]] = {
    "gemma2": _gemma,
    "albert": _albert,
    "bart": _bart,
    "fnet": _fnet,
    "poolformer": _poolformer,
    "videomae": _videos,
    "patchtst": _series,
    "autoencoder": _autoencoder,
    "shufflenet": _shufflenet,
    "graphs": _graphs,
    "denoiser": _denoiser,
}
IMAGES = ("poolformer", "autoencoder", "shufflenet", "denoiser")
"""Those that are run with images in channels_last too."""
