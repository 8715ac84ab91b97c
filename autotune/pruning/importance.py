"""What each unit of channels is worth, by the norms of its weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .channels import Block, Side
from .how import Criterion

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LayerNorm)


def importance(model: nn.Module, block: Block, criterion: Criterion) -> Tensor:
    """Of each unit of a block: norms of what it has in all layers, over the block's mean; or by another criterion.

    Args:
        model: that has the block's layers, whole.
        block: of units that are alike.
        criterion: see :data:`Criterion`.
    """
    if criterion == "random":
        return torch.rand(block.num_units)
    sums = torch.zeros(block.num_units)
    for side, places in block.places.items():
        if (norms := _norms(model, side, 1 if criterion == "l1" else 2)) is not None:
            sums += norms[places].sum(1)
    return _over_larger(sums) if criterion == "lamp" else sums / sums.mean().clamp_min(torch.finfo(sums.dtype).tiny)


def _norms(model: nn.Module, side: Side, power: int) -> Tensor | None:
    """Of each channel of a linear layer, a convolution or a normalisation; None of anything else."""
    owner, _, leaf = side.path.rpartition(".")
    module = getattr(model.get_submodule(owner), leaf)
    if not isinstance(module, (nn.Linear, _ConvNd, *_NORMS)) or module.weight is None:
        return None
    sizes = module.weight.detach().float().abs().pow(power)
    if isinstance(module, _NORMS):
        return sizes if sizes.dim() == 1 else None
    parts = module.groups if isinstance(module, _ConvNd) else 1
    if parts > 1 and parts == getattr(module, "out_channels", None):
        return None  # depthwise: the layers on both sides tell more
    is_first = side.is_output != (isinstance(module, _ConvNd) and module.transposed)
    sums = sizes.transpose(0, 0 if is_first else 1).flatten(1).sum(1)
    return sums.repeat(side.width // len(sums))


def _over_larger(sizes: Tensor) -> Tensor:
    """LAMP: each over the sum of those that are no smaller."""
    ordered, places = sizes.sort()
    return torch.empty_like(sizes).scatter_(0, places, ordered / ordered.flip(0).cumsum(0).flip(0))
