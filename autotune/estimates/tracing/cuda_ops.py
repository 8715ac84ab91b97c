"""Operations that torch takes apart otherwise on CUDA than on a CPU: dropout, attention, RMSNorm, and autocast's.

Fake tensors are a CPU's here, whatever is planned for. So CUDA's choices are registered in place of a CPU's kernels, as
any library registers its own, and hold wherever an operation is called from, backward's recomputation included.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import _scoped_library
from torch.nn.attention import SDPBackend

from .cuda_autocast import autocast_kernels

_aten = torch.ops.aten
_COMPOSITE = "CompositeImplicitAutograd"
_HALVES = (torch.float16, torch.bfloat16)
_FLASH_HEAD, _CUDNN_HEAD, _MASK_ROW = 256, 128, 16
"""The largest head that flash attention takes, and cuDNN's before Hopper; and what a row of the efficient kernel's mask
is a multiple of."""


@contextmanager
def cuda_ops() -> Iterator[None]:
    """A context in which operations over a CPU's tensors are made up of the same ones as on CUDA, in the whole
    process."""
    with _scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says once that a kernel has taken another's place
            library.impl("dropout", _dropout, _COMPOSITE)
            library.impl("scaled_dot_product_attention", _attention, _COMPOSITE)
            library.impl("rms_norm", _rms_norm, _COMPOSITE)
            for name in ("softmax.int", "log_softmax.int"):
                library.impl(name, _softmax(name), _COMPOSITE)
            for name, kernel in autocast_kernels():
                library.impl(name, kernel, "AutocastCPU")
        with _fake_flex():
            yield


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """Its mask is bytes on CUDA, and of the input's type on a CPU."""
    if not train or p == 0.0 or not input.numel():
        return input
    if p == 1.0:
        return input * torch.zeros((), dtype=input.dtype, device=input.device)
    dropped: Tensor = torch.native_dropout(input, p, True)[0]
    return dropped


class _FusedRMSNorm(torch.autograd.Function):
    """As large as what CUDA's kernels read and write: values do not matter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_dims: int, weight: Tensor | None) -> Tensor:
        wide = torch.float32 if x.dtype in _HALVES else x.dtype
        scale = x.mean(list(range(-num_dims, 0)), keepdim=True, dtype=wide)
        ctx.save_for_backward(x, scale, weight)
        return x.neg()  # which autocast leaves alone, where it leaves RMSNorm alone

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, _, weight = ctx.saved_tensors
        grad_weight = grad.sum_to_size(weight.shape) if ctx.needs_input_grad[2] else None
        return grad * x if ctx.needs_input_grad[0] else None, None, grad_weight


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """One kernel, which keeps its input and a number a row; where the weight's type is another, as on a CPU.

    Source: aten/src/ATen/native/layer_norm.cpp, rms_norm_symint; native_functions.yaml, _fused_rms_norm.
    """
    if weight is not None and weight.dtype != x.dtype:
        unfused: Tensor = _aten._fused_rms_norm(x, shape, weight, eps)[0]
        return unfused
    fused: Tensor = _FusedRMSNorm.apply(x.contiguous(), len(shape), weight)  # type: ignore[no-untyped-call]
    return fused


def _softmax(name: str) -> Callable[..., Tensor]:
    """In fp32 of float16 numbers, which CUDA's kernel reads as they are; everything else is turned first.

    Source: aten/src/ATen/native/SoftMax.cpp, softmax.
    """
    kernel = getattr(_aten, "_" + name.partition(".")[0])

    def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        converts = input.dtype == torch.float16 and dtype == torch.float32
        given = input if converts or dtype is None else input.to(dtype)
        found: Tensor = kernel(given, dim, converts)
        return found

    return softmax


def attention_choice(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> SDPBackend:  # fmt: skip
    """The kernel that CUDA takes for an attention, of those that are allowed, from compute capability 8.0 on.

    Raises:
        RuntimeError: none of them does it.

    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, can_use_flash_attention,
    can_use_mem_efficient_attention and can_use_cudnn_attention. The first two do not ask for dropout. Where others are
    allowed too, cuDNN's is not told from them: it keeps no more.
    """
    allowed: Any = torch.backends.cuda
    inputs = (query, key, value)
    head, is_half = query.size(-1), query.dtype in _HALVES
    is_plain = all(
        x.dim() == 4 and x.dtype == query.dtype and len(x) == len(query) and 0 not in x.shape[1:] and x.stride(-1) == 1
        for x in inputs
    )
    is_grouped = is_plain and not query.size(1) == key.size(1) == value.size(1)
    is_square = not is_causal or query.size(2) == key.size(2)
    is_even = head == key.size(-1) == value.size(-1)
    if is_plain and is_half and (enable_gqa or not is_grouped):
        if allowed.flash_sdp_enabled() and attn_mask is None and is_square and is_even and head <= _FLASH_HEAD:
            return SDPBackend.FLASH_ATTENTION
        others = (allowed.flash_sdp_enabled, allowed.mem_efficient_sdp_enabled, allowed.math_sdp_enabled)
        sizes = (head, value.size(-1))
        fits = max(sizes) <= _CUDNN_HEAD and not any(size % 8 for size in sizes) and (dropout_p * 16) % 1 == 0
        if allowed.cudnn_sdp_enabled() and not any(is_on() for is_on in others) and fits:
            return SDPBackend.CUDNN_ATTENTION
    aligned = 8 if is_half else 4
    fits = head == key.size(-1) and head % aligned == value.size(-1) % aligned == 0
    is_known = is_plain and not is_grouped and (is_half or query.dtype == torch.float32)
    if allowed.mem_efficient_sdp_enabled() and fits and is_known:
        return SDPBackend.EFFICIENT_ATTENTION
    if allowed.math_sdp_enabled():
        return SDPBackend.MATH
    raise RuntimeError("No available kernel.  Aborting execution.")


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """``F.scaled_dot_product_attention``.

    Source: aten/src/ATen/native/transformers/attention.cpp, scaled_dot_product_attention.
    """
    how: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    choice = attention_choice(query, key, value, attn_mask, dropout_p, is_causal, **how)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
    found: Tensor
    if choice in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):  # which keep the same
        head = query.size(-1)
        query, key, value = (F.pad(x, (0, -head % 8)) if head % 8 else x for x in (query, key, value))
        scale = scale or head**-0.5
        found = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return found[..., :head] if head % 8 else found
    if choice == SDPBackend.EFFICIENT_ATTENTION:
        trains = query.requires_grad or key.requires_grad or value.requires_grad
        if attn_mask is not None:
            attn_mask = _rows_padded(attn_mask.expand(*query.shape[:3], key.size(2)))
        found = _aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, trains, dropout_p, is_causal, scale=scale
        )[0]
        return found
    found = _aten._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal, **how)[0]
    return found


@contextmanager
def _fake_flex() -> Iterator[None]:
    library: Any = sys.modules.get("transformers.integrations.flex_attention")
    own = getattr(library, "compile_friendly_flex_attention", None)
    if own is not None:
        library.compile_friendly_flex_attention = _flex
    try:
        yield
    finally:
        if own is not None:
            library.compile_friendly_flex_attention = own


def _flex(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, **how: Any) -> Tensor:
    """transformers' flex attention, which a CPU has no backward of: like flash attention it keeps its inputs, its
    output and a number a row, of any dtype.

    Source: torch/_higher_order_ops/flex_attention.py, FlexAttentionAutogradOp.
    """
    found: Tensor = _aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)[0]
    return found


def _rows_padded(mask: Tensor) -> Tensor:
    """The mask with rows whose length is a multiple of 16, or whose strides are: else it is copied."""
    length = mask.size(-1)
    if length % _MASK_ROW:
        return F.pad(mask, (0, -length % _MASK_ROW))[..., :length]
    return mask.contiguous() if any(stride % _MASK_ROW for stride in mask.stride()[:3]) else mask
