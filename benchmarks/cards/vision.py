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
from torch import nn

_OWN = "torchvision::"


def torchvision_model(name: str) -> nn.Module:
    """By torchvision's own name."""
    import_torchvision()
    import torchvision.models

    model: nn.Module = getattr(torchvision.models, name)()
    return model


def timm_model(name: str, fuses_attention: bool = True) -> nn.Module:
    """By timm's own name. Versions before 0.9 fused no attention."""
    import_torchvision()
    import timm
    import timm.layers

    timm.layers.set_fused_attn(fuses_attention)
    model: nn.Module = timm.create_model(name)
    return model


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
