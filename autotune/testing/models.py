"""The zoo's models: small, one for each way in which models differ that a technique could trip over."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MlpBlock(nn.Module):
    """Linear, GELU, residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) in and out."""
        return x + F.gelu(self.linear(x))


class Mlp(nn.Module):
    """Four residual blocks in a ModuleList, between two linear layers."""

    def __init__(self, num_inputs: int = 6, width: int = 16, num_classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(num_inputs, width)
        self.blocks = nn.ModuleList(MlpBlock(width) for _ in range(4))
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, num_inputs) to (batch, num_classes)."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x)
        return scores


def cnn(num_classes: int = 3) -> nn.Sequential:
    """Convolutions with BatchNorm, and no repeated blocks."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, num_classes),
    )


class ResidualBlock(nn.Module):
    """conv-BatchNorm-ReLU-conv-BatchNorm, with a projection where the shape changes."""

    def __init__(self, num_inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(num_inputs, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.project = nn.Conv2d(num_inputs, width, 1) if num_inputs != width else nn.Identity()
        self.stride = stride  # of the projection's input: oneDNN's strided kernels for so few channels are at fault

    def forward(self, x: Tensor) -> Tensor:
        """(batch, num_inputs, height, width) to (batch, width, …)."""
        return F.relu(self.project(x[..., :: self.stride, :: self.stride]) + self.body(x))


class ResNet(nn.Module):
    """Two stages of two residual blocks each, nested in Sequentials."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.stages = nn.Sequential(
            nn.Sequential(ResidualBlock(4, 4, 1), ResidualBlock(4, 4, 1)),
            nn.Sequential(ResidualBlock(4, 8, 2), ResidualBlock(8, 8, 1)),
        )
        self.head = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, height, width) to (batch, num_classes)."""
        scores: Tensor = self.head(self.stages(self.stem(x)).mean((2, 3)))
        return scores


class GptBlock(nn.Module):
    """Pre-norm causal attention and MLP, with dropout in both and inside the attention."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) in and out; two heads."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        rate = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        change: Tensor = self.dropout(self.mlp(self.norm_2(x)))
        return x + change


class Gpt(nn.Module):
    """Token and position embeddings, three blocks, a linear head."""

    def __init__(self, vocabulary: int = 11, max_length: int = 8, width: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(max_length, width)
        self.blocks = nn.ModuleList(GptBlock(width, dropout) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) of token ids to (batch, length, vocabulary)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


class Lstm(nn.Module):
    """Embedding, a two-layer LSTM with dropout between the layers, a linear head on the last state."""

    def __init__(self, vocabulary: int = 11, width: int = 8, num_classes: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) of token ids to (batch, num_classes)."""
        states, _ = self.lstm(self.embedding(tokens))
        scores: Tensor = self.head(states[:, -1])
        return scores


class Tied(nn.Module):
    """The embedding's weight is the head's, and one block stands twice."""

    def __init__(self, vocabulary: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        block = MlpBlock(width)
        self.blocks = nn.ModuleList([block, MlpBlock(width), block])
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) of token ids to (batch, length, vocabulary)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x)
        return scores


class InputImage(nn.Module):
    """What is optimized is an image; the network that looks at it is frozen, and in eval mode."""

    def __init__(self, shape: Sequence[int] = (3, 8, 8)) -> None:
        super().__init__()
        self.image = nn.Parameter(torch.zeros(1, *shape))
        self.network = cnn().requires_grad_(False).eval()

    def forward(self, shift: Tensor) -> Tensor:
        """(batch, 3, height, width) of noise to (batch, num_classes) of scores."""
        scores: Tensor = self.network(self.image + shift)
        return scores
