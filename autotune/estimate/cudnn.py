"""What convolutions work in on a GPU, beside their operands and results.

Unless it is told to time them all, torch takes the kernel that cuDNN's heuristics name first, which mostly is one for
tensor cores. These read and write channels_last, so whatever lies in planes is copied for them, in one workspace. Not
held against a card; kernels that transform their operands (Winograd, FFT) take more.

Source: aten/src/ATen/native/cudnn/Conv_v8.cpp, run_conv_plan and get_generator_sources.
"""

from __future__ import annotations

from typing import Any

import torch

from .kernels import Like

__all__ = ["cudnn_convolution", "cudnn_convolution_backward"]

_COMPUTED = (torch.float32, torch.bfloat16, torch.float16)
"""What tensor cores multiply; single precision as tf32, which torch allows convolutions unless it is told not to."""


def cudnn_convolution(
    y: Like, x: Like, weight: Like, bias: Any, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, output_padding: list[int], groups: int,
) -> int:  # fmt: skip
    """Copies of input, weight and result, which lies as they do."""
    if _is_torchs_own(weight, transposed, groups):
        return 0
    is_last = x.is_channels_last() or weight.is_channels_last()
    return _copied_bytes(x, weight) + (0 if is_last else _copied_bytes(y))


def cudnn_convolution_backward(
    results: Any, grad: Like, x: Like, weight: Like, bias_sizes: Any, stride: list[int], padding: list[int],
    dilation: list[int], transposed: bool, output_padding: list[int], groups: int, wanted: list[bool],
) -> int:  # fmt: skip
    """Copies of two of the gradient, the input and the weight, and of what has the third's shape: one gradient after
    the other, the weight's last, when the input's is there."""
    if not any(wanted[:2]) or _is_torchs_own(weight, transposed, groups):
        return 0
    return _copied_bytes(grad, x, weight)


def _is_torchs_own(weight: Like, transposed: bool, groups: int) -> bool:
    """Depthwise convolutions have kernels of torch's, which take nothing."""
    return groups > 1 and weight.size[1] == 1 and not transposed


def _copied_bytes(*operands: Like) -> int:
    return sum(one.num_bytes for one in operands if one.dtype in _COMPUTED and not one.is_dense(channels_last=True))
