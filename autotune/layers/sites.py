"""The calls that a module's forward makes, and who else keeps what they return."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from .keepers import find_keepers

__all__ = ["Site", "structural_sites", "traced_sites"]

_WEIGHTED = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
_KEEP_NOTHING = (nn.Dropout, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool2d)


@dataclass(frozen=True)
class Site:
    """A call within a module's ``forward``."""

    keepers: tuple[TensorWeakRef, ...] = ()
    """Weights whose gradient needs the call's output: while one of them trains, the output is kept in any case. Noted
    weakly, so that a module that is saved or copied alone takes no others with it."""
    is_kept: bool = False
    """Whether somebody keeps the call's output whatever trains: a product, a softmax, a normalisation."""
    recomputes: bool = False
    """Whether BatchNorm in training, and the residual sums behind it, may be computed again in backward."""
    rounds: bool = False
    """Whether the derivatives of GELU and SiLU may be kept in 8 bits."""

    def output_is_kept(self) -> bool:
        """Whether somebody else keeps the output in this forward, so that bits of it would come on top."""
        weights = (reference() for reference in self.keepers)
        return self.is_kept or any(weight is not None and weight.requires_grad for weight in weights)

    def __reduce__(self) -> Any:
        weights = [weight for reference in self.keepers if (weight := reference()) is not None]
        return _site, (weights, self.is_kept, self.recomputes, self.rounds)


def structural_sites(model: nn.Module, options: Site) -> dict[nn.Module, Site]:
    """What the structure tells of each module's calls: within a Sequential the next layer, elsewhere any weight."""
    anyone = _noted(model.parameters())
    sites = {module: replace(options, keepers=anyone) for module in model.modules()}
    for module in model.modules():
        if type(module) is nn.Sequential:
            sites.update(_within(module, options))
    return sites


def traced_sites(model: nn.Module, run: Callable[[nn.Module], Any], options: Site) -> dict[nn.Module, Site]:
    """What a run of the model over fake tensors tells of its activations' calls; the structure where it fails.

    Args:
        model: not converted.
        run: a forward of the model that it is given, and its loss if there is one.
        options: of every site.
    """
    sites = structural_sites(model, options)
    try:
        found = find_keepers(model, run)
    except Exception as error:  # noqa: BLE001 - a user's forward may raise anything over tensors without values
        warnings.warn(
            f"who keeps what was decided by the model's structure, since it did not run over tensors without values: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            stacklevel=4,
        )
        return sites
    for module, (weights, is_kept) in found.items():
        sites[module] = replace(options, keepers=_noted(weights), is_kept=is_kept)
    return sites


def _site(weights: list[Tensor], *rest: bool) -> Site:
    """A site that was copied or pickled."""
    return Site(_noted(weights), *rest)


def _noted(weights: Iterable[Tensor]) -> tuple[TensorWeakRef, ...]:
    return tuple(TensorWeakRef(weight) for weight in weights)


def _within(sequential: nn.Sequential, options: Site) -> Iterator[tuple[nn.Module, Site]]:
    layers = [layer for layer in sequential if type(layer) is not nn.Identity]
    for layer, following in pairwise(layers):
        if isinstance(following, _WEIGHTED):
            yield layer, replace(options, keepers=_noted(following.parameters()))
        elif isinstance(following, _KEEP_NOTHING):
            yield layer, replace(options, keepers=())
