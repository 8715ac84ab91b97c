"""Workspace of convolutions on a GPU, beside their operands and results.

By default torch takes the kernel that cuDNN's heuristics name first, mostly one for tensor cores. These read and write
channels_last, so that contiguous operands are copied into one workspace. Not held against a card yet. Kernels that
transform their operands (Winograd, FFT) take more.

Source: aten/src/ATen/native/cudnn/Conv_v8.cpp, run_conv_plan and get_generator_sources.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .layouts import is_channels_last, is_dense

_COMPUTED = (torch.float32, torch.bfloat16, torch.float16)
"""Types that tensor cores multiply; fp32 as tf32, which torch allows for convolutions by default."""


def cudnn_convolution(
    y: Tensor, x: Tensor, weight: Tensor, bias: Any, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, output_padding: list[int], groups: int,
) -> int:  # fmt: skip
    """Copies of input, weight and result, where these are not channels_last."""
    if _is_torchs_own(weight, transposed, groups):
        return 0
    is_last = is_channels_last(x) or is_channels_last(weight)
    return _copied_bytes(x, weight) + (0 if is_last else _copied_bytes(y))


def cudnn_convolution_backward(
    results: Any, grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, stride: list[int], padding: list[int],
    dilation: list[int], transposed: bool, output_padding: list[int], groups: int, wanted: list[bool],
) -> int:  # fmt: skip
    """Copies of the gradient, the input and the weight: two, and what has the third's shape. The input's gradient is
    computed first, then the weight's."""
    if not any(wanted[:2]) or _is_torchs_own(weight, transposed, groups):
        return 0
    return _copied_bytes(grad, x, weight)


def _is_torchs_own(weight: Tensor, transposed: bool, groups: int) -> bool:
    """Whether it is depthwise: torch computes those itself, without a workspace."""
    return groups > 1 and weight.size(1) == 1 and not transposed


def _copied_bytes(*operands: Tensor) -> int:
    return sum(one.nbytes for one in operands if one.dtype in _COMPUTED and not is_dense(one, channels_last=True))
