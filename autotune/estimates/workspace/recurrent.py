"""What oneDNN takes for a recurrent layer on a CPU while it runs; what it keeps for backward is one of its results.

Measured with torch.profiler's memory events on torch 2.13 (x86, AVX-512).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_HALVES = (torch.bfloat16, torch.float16)


def onednn_recurrent(results: Any, x: Tensor, *rest: Any) -> int:
    """Bytes of the weights in blocks; in fp32 also of the input of the gates at each step."""
    weights: tuple[Tensor, ...] = rest[:4]
    steps = 0 if x.dtype in _HALVES else 4 * math.prod(x.shape[:2]) * weights[1].size(0)
    return sum(one.nbytes for one in weights) + steps


def onednn_recurrent_backward(results: Any, x: Tensor, *rest: Any) -> int:
    """Bytes of the weights and their gradients in blocks, the latter in fp32; also of the gates' gradients of each
    step, or in half precision of those of the states."""
    weights: tuple[Tensor, ...] = rest[:4]
    is_half = x.dtype in _HALVES
    steps = 4 * math.prod(x.shape[:2]) * weights[1].size(1 if is_half else 0)
    return (3 if is_half else 2) * sum(one.nbytes for one in weights) + steps
