"""Models of kinds that the estimator was not developed on; docs/inside/estimates.md has their first run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..layer_models import Built
from .tokens import tokens


def _classifier(config: Any, side: int = 96) -> Built:
    from transformers import AutoModelForImageClassification

    config.num_labels = 10
    return AutoModelForImageClassification.from_config(config), {
        "pixel_values": torch.zeros(8, 3, side, side),
        "labels": torch.arange(8) % 10,
    }


def _writer(config: Any) -> Built:
    from transformers import AutoModelForCausalLM

    words = tokens(config.vocab_size, 64)
    return AutoModelForCausalLM.from_config(config), {"input_ids": words, "labels": words}


def _convnext() -> Built:
    from transformers import ConvNextConfig

    return _classifier(ConvNextConfig(depths=[2, 2, 4, 2], hidden_sizes=[64, 128, 256, 512]))


def _mobilenet() -> Built:
    from transformers import MobileNetV2Config

    return _classifier(MobileNetV2Config(image_size=96))


def _regnet() -> Built:
    from transformers import RegNetConfig

    return _classifier(RegNetConfig(hidden_sizes=[64, 128, 256, 512], depths=[1, 2, 4, 1], groups_width=32))


def _swin() -> Built:
    from transformers import SwinConfig

    return _classifier(
        SwinConfig(image_size=112, window_size=7, embed_dim=64, depths=[2, 2, 2], num_heads=[2, 4, 8]), 112
    )


def _opt() -> Built:
    from transformers import OPTConfig

    return _writer(
        OPTConfig(vocab_size=20_000, hidden_size=384, ffn_dim=1536, num_hidden_layers=6, num_attention_heads=6)
    )


def _whisper() -> Built:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=8000, d_model=256, encoder_layers=4, decoder_layers=4, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=1024, decoder_ffn_dim=1024, max_source_positions=100,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    sounds = torch.zeros(8, config.num_mel_bins, 2 * config.max_source_positions)
    return WhisperForConditionalGeneration(config), {"input_features": sounds, "labels": tokens(8000, 48)}


class _Recurrent(nn.Module):
    """Words to words by recurrent layers."""

    def __init__(self, kind: type[nn.RNNBase], bidirectional: bool) -> None:
        super().__init__()
        width = 256 if bidirectional else 512
        self.embed = nn.Embedding(8000, 256)
        self.layers = kind(256, width, num_layers=2, batch_first=True, dropout=0.1, bidirectional=bidirectional)
        self.head = nn.Linear(512, 8000)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        y = self.head(self.layers(self.embed(input_ids))[0])
        return nn.functional.cross_entropy(y.flatten(0, 1), labels.flatten())


def _recurrent(kind: type[nn.RNNBase], bidirectional: bool = False) -> Built:
    words = tokens(8000, 64)
    return _Recurrent(kind, bidirectional), {"input_ids": words, "labels": words}


MODELS: dict[str, Callable[[], Built]] = {
    "convnext": _convnext,
    "mobilenet": _mobilenet,
    "regnet": _regnet,
    "swin": _swin,
    "opt": _opt,
    "whisper": _whisper,
    "lstm": partial(_recurrent, nn.LSTM),
    "gru": partial(_recurrent, nn.GRU),
    "bilstm": partial(_recurrent, nn.LSTM, bidirectional=True),
}
IMAGES = ("convnext", "mobilenet", "regnet")
"""Those that are run with images in channels_last too."""
