"""Workspace of convolutions on a GPU, beside their operands and results.

By default torch takes the kernel that cuDNN's heuristics name first, mostly one for tensor cores. These read and write
channels_last, so that contiguous operands are copied into one workspace: right for convnext_large and whisper on three
cards (``python -m benchmarks.cards``). Forward of a 1x1 convolution of stride 1 is a matrix product in either layout,
and takes none, as a ResNet-50 and a ResNet-152 showed on an H200 (``benchmarks/results/gpu/h200-workspaces.json``).
Kernels that transform their operands take more, and nothing in the shapes tells which is chosen: regnet_y_128gf took 15
GiB more at 136 samples than at 128, on an H100 and not on an L40S.

Source: aten/src/ATen/native/cudnn/Conv_v8.cpp, run_conv_plan, try_configs and get_generator_sources.
"""

from __future__ import annotations

import math
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
    is_product = not transposed and groups == 1 and math.prod((*weight.shape[2:], *stride)) == 1
    if is_product or _is_torchs_own(weight, transposed, groups):
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


def cudnn_columns(
    x: Tensor, weight: Tensor, bias: Any, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, output_padding: list[int], groups: int,
) -> int:  # fmt: skip
    """Most that a grouped convolution may take: a copy of the input for each of the weight's places. Of one group,
    tensor cores have kernels without any."""
    if groups == 1 or _is_torchs_own(weight, transposed, groups) or x.dtype not in _COMPUTED:
        return 0
    places = math.prod(weight.shape[2:])
    return places * x.nbytes if places > 1 else 0


def _is_torchs_own(weight: Tensor, transposed: bool, groups: int) -> bool:
    """Whether it is depthwise: torch computes those itself, without a workspace."""
    return groups > 1 and weight.size(1) == 1 and not transposed


def _copied_bytes(*operands: Tensor) -> int:
    return sum(one.nbytes for one in operands if one.dtype in _COMPUTED and not is_dense(one, channels_last=True))
