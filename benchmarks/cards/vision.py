"""Models of torchvision and timm, built to be traced.

PyPI's torchvision is built for another torch than PyPI's CPU build: its own operators do not load, and the fakes that
it registers for them fail. These are left out; none of the models here uses them.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_OWN = "torchvision::"


def torchvision_model(name: str) -> nn.Module:
    """By torchvision's own name."""
    import_torchvision()
    import torchvision.models

    model: nn.Module = getattr(torchvision.models, name)()
    return model


def timm_model(name: str, fuses_attention: bool = True) -> nn.Module:
    """By timm's own name. Versions before 0.9 fused no attention. TResNets had InPlaceABN's norms then."""
    import_torchvision()
    import timm
    import timm.layers

    timm.layers.set_fused_attn(fuses_attention)
    model: nn.Module = timm.create_model(name)
    if name.startswith("tresnet"):
        for module in [one for one in model.modules() if isinstance(one, timm.layers.ConvNormAct)]:
            module.bn = _InPlaceNorm(module.bn)
    return model


class _InPlaceNorm(nn.Module):
    """A norm and its activation in place of what they are put on."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return _InPlace.apply(x, self.norm.weight, self.norm.bias)  # type: ignore[no-any-return, no-untyped-call]


class _InPlace(torch.autograd.Function):
    """As large as what InPlaceABN reads and writes: values do not matter.

    Source: mapillary/inplace_abn, inplace_abn/functions.py and src/inplace_abn_cuda.cu, backward_reduce_template.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x.mul_(1)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x, weight, torch.empty_like(weight))
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, weight, _variance = ctx.saved_tensors
        _normalized, grad = torch.empty_like(y), torch.empty_like(y)
        return grad, torch.empty_like(weight), torch.empty_like(weight)


@functools.cache
def import_torchvision() -> None:
    """Before whatever imports it by itself, as transformers does where it is installed."""
    if importlib.util.find_spec("torchvision") is None:
        return
    register = torch.library.register_fake

    def tolerant(name: Any, *more: Any, **options: Any) -> Callable[[Any], Any]:
        if isinstance(name, str) and name.startswith(_OWN):
            return lambda function: function
        return register(name, *more, **options)  # type: ignore[no-any-return]

    torch.library.register_fake = tolerant  # type: ignore[assignment]
    try:
        import torchvision  # noqa: F401
    finally:
        torch.library.register_fake = register
