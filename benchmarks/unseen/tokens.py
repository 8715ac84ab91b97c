"""``tokens``: the words of a batch."""

from __future__ import annotations

import torch
from torch import Tensor


def tokens(vocabulary: int, length: int) -> Tensor:
    """Eight texts, (8, ``length``), of numbers below ``vocabulary``."""
    return torch.arange(8 * length).reshape(8, length) % vocabulary
