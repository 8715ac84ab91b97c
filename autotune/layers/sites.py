"""The calls that a module's forward makes, and who else keeps what they return."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor, nn

__all__ = ["Site", "structural_sites"]

_WEIGHTED = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
_KEEP_NOTHING = (nn.Dropout, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool2d)


@dataclass(frozen=True)
class Site:
    """A call within a module's ``forward``."""

    keepers: Sequence[Tensor] = ()
    """Weights whose gradient needs the call's output: while one of them trains, the output is kept in any case."""
    recomputes: bool = False
    """Whether BatchNorm in training, and the residual sums behind it, may be computed again in backward."""
    rounds: bool = False
    """Whether the derivatives of GELU and SiLU may be kept in 8 bits."""

    def output_is_kept(self) -> bool:
        """Whether somebody else keeps the output in this forward, so that bits of it would come on top."""
        return any(weight.requires_grad for weight in self.keepers)


def structural_sites(model: nn.Module, options: Site) -> dict[nn.Module, Site]:
    """What the structure tells of each module's calls: within a Sequential the next layer, elsewhere any weight."""
    weights = [module.weight for module in model.modules() if isinstance(module, _WEIGHTED)]
    sites = {module: replace(options, keepers=weights) for module in model.modules()}
    for module in model.modules():
        if type(module) is nn.Sequential:
            sites.update(_within(module, options))
    return sites


def _within(sequential: nn.Sequential, options: Site) -> Iterator[tuple[nn.Module, Site]]:
    layers = [layer for layer in sequential if type(layer) is not nn.Identity]
    for layer, following in pairwise(layers):
        if isinstance(following, _WEIGHTED):
            yield layer, replace(options, keepers=(following.weight,))
        elif isinstance(following, _KEEP_NOTHING):
            yield layer, replace(options, keepers=())
