"""Single layers and small groups of them for ``benchmarks.layers``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Layer:
    """A layer, and the input that it is measured on."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    least: tuple[float | None, float | None] = (None, None)
    """What a backward needs at the least, as a multiple of the input: while weights train, and frozen. None: open."""
    num_words: int | None = None
    """The input is words of so many instead of real numbers."""
    autocast: bool = False
    """To bf16."""

    def cases(self) -> Iterator[tuple[str, float | None]]:
        """What trains, and what is kept then at the least."""
        if not any(True for _ in self.build().parameters()):
            yield "input", self.least[1]
            return
        yield "trained", self.least[0]
        if self.num_words is None:  # else nothing wants a gradient
            yield "frozen", self.least[1]

    def build_case(self, case: str) -> nn.Module:
        """The layer, frozen unless it is to train."""
        return self.build().requires_grad_(case == "trained")

    def build_input(self) -> Tensor:
        """Random numbers, or words."""
        return torch.randn(self.shape) if self.num_words is None else torch.randint(self.num_words, self.shape)

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        """A loss behind the layer that keeps nothing, and whose gradient is no view; the input wants one too."""
        if self.num_words is None:
            x = x.detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            output = model(x * 1)  # a layer may work in place, and a leaf may not be changed
        return (output * 1.0).sum()


class _Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class _CrossEntropy(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        rows = logits.flatten(0, -2)
        return F.cross_entropy(rows, torch.arange(len(rows)) % rows.shape[1])


class _Attention(nn.Module):
    """Of queries, keys and values that come as one tensor."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*x.unbind(), is_causal=True, dropout_p=self.dropout)


class _SelfAttention(nn.Module):
    def __init__(self, dropout: float = 0.0, need_weights: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(256, 4, dropout, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


class _SwiGLU(nn.Module):
    """Shazeer 2020, arXiv:2002.05202."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(256, 512), nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class _Residual(nn.Module):
    """As in a ResNet: the sum's ReLU is the next convolution's input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.next = _conv(2), nn.BatchNorm2d(32), _conv(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.next(F.relu(self.norm(self.inner(x)) + x))


class _Block(nn.Module):
    """A block of GPT-2, without dropout in its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.project = nn.LayerNorm(256), nn.Linear(256, 768), nn.Linear(256, 256)
        self.norm2, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = [part.view(batch, length, 4, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
        x = x + self.dropout(self.project(attended.reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


ROWS, TOKENS, SENTENCES = (2048, 256), (8, 256, 256), (32, 64, 256)
SIGNALS, IMAGES, VOLUMES = (16, 32, 1024), (16, 32, 32, 32), (8, 16, 16, 16, 16)
_WEIGHT, _ONE, _BIT = (1.0, 0.0), (1.0, 1.0), (1 / 32, 1 / 32)


def _conv(num_dims: int, transposed: bool = False, **rest: Any) -> nn.Module:
    kind = getattr(nn, f"Conv{'Transpose' * transposed}{num_dims}d")
    channels = 16 if num_dims == 3 else 32
    return kind(channels, channels, 3, padding=1, **rest)


def _batch_norm(num_dims: int) -> nn.Module:
    return getattr(nn, f"BatchNorm{num_dims}d")(16 if num_dims == 3 else 32)


_BY_DIMS = {1: SIGNALS, 2: IMAGES, 3: VOLUMES}

LAYERS: dict[str, Layer] = {
    "Linear, rows": Layer(lambda: nn.Linear(256, 256), ROWS, _WEIGHT),
    "Linear": Layer(lambda: nn.Linear(256, 256), TOKENS, _WEIGHT),
    "Linear, not contiguous": Layer(lambda: nn.Sequential(_Transposed(), nn.Linear(256, 256)), TOKENS, _WEIGHT),
    "Linear, bf16 autocast": Layer(lambda: nn.Linear(256, 256), (512, 256), (None, 0.0), autocast=True),
    **{f"Conv{n}d": Layer(lambda n=n: _conv(n), shape, _WEIGHT) for n, shape in _BY_DIMS.items()},
    "Conv2d, depthwise": Layer(lambda: _conv(2, groups=32), IMAGES, _WEIGHT),
    "Conv2d, bf16 autocast": Layer(lambda: _conv(2), IMAGES, (None, 0.0), autocast=True),
    **{f"ConvTranspose{n}d": Layer(lambda n=n: _conv(n, True), shape, _WEIGHT) for n, shape in _BY_DIMS.items()},
    **{f"BatchNorm{n}d, train": Layer(lambda n=n: _batch_norm(n), shape, _ONE) for n, shape in _BY_DIMS.items()},
    **{
        f"BatchNorm{n}d, eval": Layer(lambda n=n: _batch_norm(n).eval(), shape, _WEIGHT)
        for n, shape in _BY_DIMS.items()
    },
    "LayerNorm": Layer(lambda: nn.LayerNorm(256), TOKENS, _ONE),
    "GroupNorm": Layer(lambda: nn.GroupNorm(8, 32), IMAGES, _ONE),
    "InstanceNorm2d": Layer(lambda: nn.InstanceNorm2d(32, affine=True), IMAGES, _ONE),
    "RMSNorm": Layer(lambda: nn.RMSNorm(256), TOKENS, _ONE),
    "Embedding": Layer(lambda: nn.Embedding(1024, 256), (8, 256), _ONE, num_words=1024),
    "ReLU": Layer(nn.ReLU, IMAGES, _BIT),
    "LeakyReLU": Layer(nn.LeakyReLU, IMAGES, _BIT),
    "ReLU6": Layer(nn.ReLU6, IMAGES, _BIT),
    "GELU": Layer(nn.GELU, TOKENS, _ONE),
    "SiLU": Layer(nn.SiLU, TOKENS, _ONE),
    "Hardswish": Layer(nn.Hardswish, IMAGES, _ONE),
    "Softplus": Layer(nn.Softplus, TOKENS, _ONE),
    "Softmax": Layer(lambda: nn.Softmax(-1), TOKENS, _ONE),
    "Sigmoid": Layer(nn.Sigmoid, TOKENS, _ONE),
    "Tanh": Layer(nn.Tanh, TOKENS, _ONE),
    "Dropout": Layer(lambda: nn.Dropout(0.1), TOKENS, _BIT),
    "MaxPool1d, 2": Layer(lambda: nn.MaxPool1d(2), SIGNALS),
    "MaxPool2d, 2": Layer(lambda: nn.MaxPool2d(2), IMAGES, (1 / 64, 1 / 64)),
    "MaxPool2d, 3 by 2": Layer(lambda: nn.MaxPool2d(3, 2, 1), IMAGES, (1 / 32, 1 / 32)),
    "MaxPool3d, 2": Layer(lambda: nn.MaxPool3d(2), VOLUMES),
    "AvgPool1d": Layer(lambda: nn.AvgPool1d(2), SIGNALS, (0.0, 0.0)),
    "AvgPool2d": Layer(lambda: nn.AvgPool2d(2), IMAGES, (0.0, 0.0)),
    "AvgPool3d": Layer(lambda: nn.AvgPool3d(2), VOLUMES, (0.0, 0.0)),
    "AdaptiveAvgPool2d": Layer(lambda: nn.AdaptiveAvgPool2d(4), IMAGES, (0.0, 0.0)),
    "cross-entropy": Layer(_CrossEntropy, (512, 1000), _ONE),
    "Linear to 8192, cross-entropy": Layer(
        lambda: nn.Sequential(nn.Linear(256, 8192, False), _CrossEntropy()), (1024, 256)
    ),
    "attention, causal": Layer(_Attention, (3, 4, 4, 256, 64), (1.34, 1.34)),
    "attention, causal, dropout": Layer(lambda: _Attention(0.1), (3, 4, 4, 256, 64)),
    "MultiheadAttention": Layer(_SelfAttention, SENTENCES, (None, 4.0)),
    "MultiheadAttention, its weights": Layer(lambda: _SelfAttention(need_weights=True), SENTENCES, (None, 4.0)),
    "MultiheadAttention, dropout": Layer(lambda: _SelfAttention(0.1), SENTENCES),
    "BatchNorm2d, ReLU, Conv2d": Layer(lambda: nn.Sequential(_batch_norm(2), nn.ReLU(), _conv(2)), IMAGES),
    "Linear, GELU, Linear": Layer(
        lambda: nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)), TOKENS
    ),
    "LayerNorm, Linear": Layer(lambda: nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256)), TOKENS),
    "SwiGLU": Layer(_SwiGLU, TOKENS),
    "residual, ReLU, Conv2d": Layer(_Residual, IMAGES),
    "GPT block": Layer(_Block, TOKENS, (None, 7.1)),
}  # fmt: skip
"""Rows of the table, in its order."""
