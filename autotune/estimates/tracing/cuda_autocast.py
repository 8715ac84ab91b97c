"""Which operations autocast computes in fp32 on CUDA: another list than a CPU's, and their results are kept in fp32.

Source: torch 2.13, aten/src/ATen/autocast_mode.h: AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE and AT_FORALL_PROMOTE.
Operations of lower precision are a CPU's too, but for some that are made of those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.library import fallthrough_kernel
from torch.utils._pytree import tree_leaves, tree_map_only


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


IN_FP32 = _names(
    """
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss
    cosine_similarity dist erfinv exp expm1 frobenius_norm.dim group_norm hinge_embedding_loss huber_loss kl_div l1_loss
    layer_norm log log10 log1p log2 logsumexp margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
    native_layer_norm nll_loss nll_loss2d norm.Scalar norm.ScalarOpt_dim nuclear_norm nuclear_norm.dim pdist
    poisson_nll_loss pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal renorm rms_norm rsqrt sinh smooth_l1_loss
    soft_margin_loss softplus tan triplet_margin_loss upsample_bicubic2d upsample_bilinear2d upsample_linear1d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
    """
)
"""Operations whose arguments are turned to fp32."""
RESULT_IN_FP32 = _names(
    """
    cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int prod prod.dim_int
    softmax.int sum sum.dim_IntList
    """
)
"""Operations that are asked for a result in fp32, where no other type is."""
IN_WIDEST = _names("addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot")
"""Operations whose arguments are turned to the widest type among them."""
_ALIKE = frozenset({"mkldnn_rnn_layer"})
"""A CPU's alone, and of lower precision as CUDA's own."""

_AUTOCAST = "AutocastCPU"


def autocast_kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    """What is registered for autocast over a CPU's tensors: names of operations, and CUDA's kernels. Of the lists, that
    is what this torch has: ``rms_norm`` is not in 2.11's."""
    on_cpu, on_cuda = _registered(_AUTOCAST), _registered("AutocastCUDA")
    for names, kernel in ((IN_FP32, _in_fp32), (RESULT_IN_FP32, _result_in_fp32), (IN_WIDEST, _in_widest)):
        for name in sorted(names & on_cuda):
            yield name, kernel(_overload(name))
    for name in sorted(on_cpu - on_cuda - _ALIKE):
        yield name, fallthrough_kernel


def _registered(key: str) -> frozenset[str]:
    found = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return frozenset(name.removeprefix("aten::") for name in found if name.startswith("aten::"))


def _overload(name: str) -> Any:
    packet, _, kind = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), kind or "default")


def _in_fp32(func: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return _cast(func, torch.float32, args, kwargs)

    return kernel


def _result_in_fp32(func: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if _is_cast(args[0]) and not any(isinstance(one, torch.dtype) for one in (*args, *kwargs.values())):
            kwargs["dtype"] = torch.float32
        with torch.autocast("cpu", enabled=False):
            return func(*args, **kwargs)

    return kernel


def _in_widest(func: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        wide = any(one.dtype == torch.float32 for one in tree_leaves((args, kwargs)) if _is_cast(one))
        return _cast(func, torch.float32 if wide else torch.get_autocast_dtype("cpu"), args, kwargs)

    return kernel


def _cast(func: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    with torch.autocast("cpu", enabled=False):
        args, kwargs = tree_map_only(Tensor, lambda x: x.to(dtype) if _is_cast(x) else x, (args, kwargs))
        return func(*args, **kwargs)


def _is_cast(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 and x.device.type == "cpu"
