"""A residual block of two linear layers, whose hidden layer is four times as wide."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TanhBlock(nn.Module):
    """Keeps its input, and the tanh of its hidden layer, for backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))
