"""Small models of each kind that is pruned: how to build them, and a loss on two samples."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

from autotune.testing.models import ResNet


class UNet(nn.Module):
    """Two levels whose outputs are concatenated on the way up."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down_1, self.down_2 = self._pair(3, width), self._pair(width, 2 * width)
        self.bottom = self._pair(2 * width, 4 * width)
        self.up_2, self.up_1 = (
            nn.ConvTranspose2d(4 * width, 2 * width, 2, 2),
            nn.ConvTranspose2d(2 * width, width, 2, 2),
        )
        self.join_2, self.join_1 = self._pair(4 * width, 2 * width), self._pair(2 * width, width)
        self.head = nn.Conv2d(width, 3, 1)

    @staticmethod
    def _pair(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x):
        first = self.down_1(x)
        second = self.down_2(F.max_pool2d(first, 2))
        x = self.bottom(F.max_pool2d(second, 2))
        x = self.join_2(torch.cat([second, self.up_2(x)], 1))
        return self.head(self.join_1(torch.cat([first, self.up_1(x)], 1)))


class Depthwise(nn.Module):
    """Inverted residuals with depthwise convolutions."""

    def __init__(self, width: int = 16, blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU6())
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, 2 * width, 1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU6(),
                nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width, bias=False),
                nn.BatchNorm2d(2 * width), nn.ReLU6(),
                nn.Conv2d(2 * width, width, 1, bias=False), nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )  # fmt: skip
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class Encoder(nn.Module):
    """torch's own encoder, whose attention is one module with a parameter for all projections."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, 11)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)))


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=8
    )
    return ViTForImageClassification(config)


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            max_position_embeddings=16,
        )
    )  # fmt: skip


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=4))


def llama(num_key_value_heads: int = 2):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=num_key_value_heads, max_position_embeddings=16,
        )
    )  # fmt: skip


def _seeded(make):
    generator = torch.Generator().manual_seed(1)
    return make(generator)


def image_loss(model):
    x = _seeded(lambda generator: torch.randn(2, 3, 16, 16, generator=generator))
    scores = model(x)
    return getattr(scores, "logits", scores).square().mean()


def token_loss(model):
    x = _seeded(lambda generator: torch.randint(0, 11, (2, 8), generator=generator))
    found = model(x)
    scores = getattr(found, "logits", found)
    targets = x if scores.dim() == 3 else x[:, 0] % 2
    return F.cross_entropy(scores.flatten(0, -2), targets.flatten())


MODELS = {
    "resnet": (ResNet, image_loss),
    "unet": (UNet, image_loss),
    "depthwise": (Depthwise, image_loss),
    "encoder": (Encoder, token_loss),
    "vit": (vit, image_loss),
    "bert": (bert, token_loss),
    "gpt2": (gpt2, token_loss),
    "llama": (llama, token_loss),
    "llama, a group for each head": (functools.partial(llama, 8), token_loss),
}
