"""Models that were first run when the faults that those of ``first`` had shown were mended."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layer_models import Built
from .tokens import tokens


def _qwen() -> Built:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=16_000, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    words = tokens(16_000, 64)
    return Qwen3ForCausalLM(config), {"input_ids": words, "labels": words}


def _mixtral() -> Built:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=8000, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    words = tokens(8000, 64)
    return MixtralForCausalLM(config), {"input_ids": words, "labels": words}


def _mamba() -> Built:
    from transformers import MambaConfig, MambaForCausalLM

    words = tokens(8000, 32)
    config = MambaConfig(vocab_size=8000, hidden_size=192, num_hidden_layers=4)
    return MambaForCausalLM(config), {"input_ids": words, "labels": words}


def _deberta() -> Built:
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    config = DebertaV2Config(
        vocab_size=16_000, hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=4,
        relative_attention=True, position_buckets=32, pos_att_type=["p2c", "c2p"], num_labels=4,
    )  # fmt: skip
    return DebertaV2ForSequenceClassification(config), {"input_ids": tokens(16_000, 96), "labels": torch.arange(8) % 4}


def _segformer() -> Built:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(hidden_sizes=[32, 64, 128, 192], decoder_hidden_size=128, num_labels=10)
    images = {"pixel_values": torch.zeros(8, 3, 96, 96), "labels": torch.zeros(8, 96, 96, dtype=torch.long)}
    return SegformerForSemanticSegmentation(config), images


class _Clip(nn.Module):
    """Images and texts, told apart by each other: every sample of a batch is compared with every other."""

    def __init__(self) -> None:
        from transformers import CLIPConfig, CLIPModel

        super().__init__()
        text = {"vocab_size": 8000, "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4}
        image = {"image_size": 96, "patch_size": 16, "hidden_size": 192, "intermediate_size": 768}
        heads = {"num_attention_heads": 4, "num_hidden_layers": 4, "projection_dim": 128}
        config = CLIPConfig(text_config=text | heads, vision_config=image | heads, projection_dim=128)
        self.clip = CLIPModel(config)

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        loss: Tensor = self.clip(input_ids=input_ids, pixel_values=pixel_values, return_loss=True).loss
        return loss


def _clip() -> Built:
    return _Clip(), {"input_ids": tokens(8000, 32), "pixel_values": torch.zeros(8, 3, 96, 96)}


def _wav2vec() -> Built:
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    config = Wav2Vec2Config(
        hidden_size=192, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4, num_labels=10,
        conv_dim=(128,) * 7, num_conv_pos_embeddings=32, num_conv_pos_embedding_groups=4,
    )  # fmt: skip
    sounds = {"input_values": torch.arange(8.0 * 8000).reshape(8, 8000).sin(), "labels": torch.arange(8) % 10}
    return Wav2Vec2ForSequenceClassification(config), sounds


class _Supervised(nn.Module):
    """A network, and a loss of classes."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, labels: Tensor, **inputs: Any) -> Tensor:
        return F.cross_entropy(self.network(**inputs), labels)


class _Dense(nn.Module):
    """A layer of a DenseNet: what it makes is put beside what it was given."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(4 * growth)
        self.conv_1 = nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.conv_2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv_1(self.norm_1(x).relu())
        return torch.cat([x, self.conv_2(self.norm_2(y).relu())], 1)


class _DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.layers = nn.ModuleList()
        channels = 32
        for _ in range(3):
            for _ in range(4):
                self.layers.append(_Dense(channels, 24))
                channels += 24
            self.layers.append(nn.Sequential(nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)))
            channels //= 2
        self.head = nn.Linear(channels, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.stem(pixel_values)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x.mean((2, 3)))
        return y


def _densenet() -> Built:
    return _Supervised(_DenseNet()), {"pixel_values": torch.zeros(8, 3, 96, 96), "labels": torch.arange(8) % 10}


class _Volumes(nn.Module):
    """A U-Net of two levels for volumes."""

    def __init__(self) -> None:
        super().__init__()
        self.down_1, self.down_2 = self._twice(1, 16), self._twice(16, 32)
        self.bottom = self._twice(32, 64)
        self.up_2, self.join_2 = nn.ConvTranspose3d(64, 32, 2, 2), self._twice(64, 32)
        self.up_1, self.join_1 = nn.ConvTranspose3d(32, 16, 2, 2), self._twice(32, 16)
        self.head = nn.Conv3d(16, 3, 1)

    @staticmethod
    def _twice(channels_in: int, channels: int) -> nn.Module:
        layers = [
            (nn.Conv3d(first, channels, 3, padding=1), nn.InstanceNorm3d(channels, affine=True), nn.LeakyReLU(0.01))
            for first in (channels_in, channels)
        ]
        return nn.Sequential(*itertools.chain.from_iterable(layers))

    def forward(self, volumes: Tensor) -> Tensor:
        first = self.down_1(volumes)
        second = self.down_2(F.max_pool3d(first, 2))
        x = self.up_2(self.bottom(F.max_pool3d(second, 2)))
        x = self.up_1(self.join_2(torch.cat([x, second], 1)))
        y: Tensor = self.head(self.join_1(torch.cat([x, first], 1)))
        return y


def _volumes() -> Built:
    labels = torch.zeros(8, 24, 24, 24, dtype=torch.long)
    return _Supervised(_Volumes()), {"volumes": torch.zeros(8, 1, 24, 24, 24), "labels": labels}


class _Gated(nn.Module):
    """A layer of a WaveNet: a gate, a way around, and a part that skips to the end."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, 2 * channels, 2, dilation=dilation)
        self.out = nn.Conv1d(channels, 2 * channels, 1)
        self.dilation = dilation

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        signal, gate = self.conv(F.pad(x, (self.dilation, 0))).chunk(2, 1)
        around, skipped = self.out(signal.tanh() * gate.sigmoid()).chunk(2, 1)
        return x + around, skipped


class _WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 48)
        self.layers = nn.ModuleList(_Gated(48, 2 ** (number % 6)) for number in range(12))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(48, 128, 1), nn.ReLU(), nn.Conv1d(128, 256, 1))

    def forward(self, sounds: Tensor) -> Tensor:
        x, total = self.embed(sounds).transpose(1, 2), 0
        for layer in self.layers:
            x, skipped = layer(x)
            total = total + skipped
        y: Tensor = self.head(total)
        return y


def _wavenet() -> Built:
    sounds = tokens(256, 1024)
    return _Supervised(_WaveNet()), {"sounds": sounds, "labels": sounds}


class _Clicks(nn.Module):
    """Bags of words and numbers, each with each, as recommenders have them."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20_000, 32, mode="mean") for _ in range(8))
        self.numbers = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 32), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(32 + 36, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 2))

    def forward(self, words: Tensor, numbers: Tensor) -> Tensor:
        first = self.numbers(numbers)
        every = torch.stack([first, *(bag(words[:, number]) for number, bag in enumerate(self.bags))], 1)
        rows, columns = torch.tril_indices(9, 9, -1)
        pairs = (every @ every.transpose(1, 2))[:, rows, columns]
        y: Tensor = self.top(torch.cat([first, pairs], 1))
        return y


def _clicks() -> Built:
    words = tokens(20_000, 8 * 16).reshape(8, 8, 16)
    return _Supervised(_Clicks()), {"words": words, "numbers": torch.zeros(8, 16), "labels": torch.arange(8) % 2}


MODELS: dict[str, Callable[[], Built]] = {
    "qwen3": _qwen,
    "mixtral": _mixtral,
    "mamba": _mamba,
    "deberta": _deberta,
    "segformer": _segformer,
    "clip": _clip,
    "wav2vec2": _wav2vec,
    "densenet": _densenet,
    "unet3d": _volumes,
    "wavenet": _wavenet,
    "clicks": _clicks,
}
IMAGES = ("segformer", "densenet")
"""Those that are run with images in channels_last too."""
