"""The calls in a module's forward, and who else saves their outputs for backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from ..errors import Caught
from .saved_by import find_savers

_WEIGHTED = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
_KEEP_NOTHING = (nn.Dropout, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool2d)


@dataclass(frozen=True)
class Holders:
    """Who else saves a tensor for backward, besides the call at hand."""

    weights: tuple[TensorWeakRef, ...] = ()
    """Weights whose gradients need it: it is saved while one of them trains. Weak references, since they belong to
    others."""
    always: bool = False
    """Whether it is saved whatever trains: by a product, a softmax, a normalisation."""

    def keep(self) -> bool:
        """Whether somebody saves it in this forward; also where a weight was replaced by another."""
        weights = (reference() for reference in self.weights)
        return self.always or any(weight is None or weight.requires_grad for weight in weights)

    def __reduce__(self) -> Any:
        return _holders, ([reference() for reference in self.weights], self.always)


@dataclass(frozen=True)
class Site:
    """A call within a module's ``forward``."""

    output: Holders = Holders()
    """Who else saves its output; where anyone does, a mask only adds memory."""
    input: Holders = Holders()
    """Who else saves its input."""
    recomputes: bool = False
    """Whether BatchNorm in training, and the residual sums behind it, may be computed again in backward."""
    rounds: bool = False
    """Whether the derivatives of GELU and SiLU may be kept in 8 bits."""


def structural_sites(model: nn.Module, options: Site) -> dict[nn.Module, Site]:
    """What the model's structure tells of each call: in a Sequential the next layer saves its output, elsewhere any
    weight may."""
    anyone = _noted(model.parameters())
    sites = {module: replace(options, output=anyone) for module in model.modules()}
    for module in model.modules():
        if type(module) is nn.Sequential:
            sites.update(_within(module, options))
    return sites


def traced_sites(model: nn.Module, run: Callable[[nn.Module], Any], options: Site) -> dict[nn.Module, Site]:
    """What a run of the model over fake tensors tells of its activations' calls; the structure, where that fails.

    Args:
        model: not converted.
        run: a forward of the model that it is given, and its loss if there is one.
        options: of every site.
    """
    sites = structural_sites(model, options)
    with Caught() as raised:  # a user's forward may raise anything over fake tensors
        found = find_savers(model, run)
    if (error := raised.error) is not None:
        warnings.warn(
            "memory-saving layers: which layers keep an output was decided by the model's structure, since it did not "
            "run over fake tensors: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            stacklevel=4,
        )
        return sites
    for module, (output, input) in found.items():
        sites[module] = replace(options, output=_noted(*output), input=_noted(*input))
    return sites


def _noted(weights: Iterable[Tensor], always: bool = False) -> Holders:
    return Holders(tuple(TensorWeakRef(weight) for weight in weights), always)


def _holders(weights: list[Tensor | None], always: bool) -> Holders:
    """What was copied or pickled."""
    return _noted([weight for weight in weights if weight is not None], always or None in weights)


def _within(sequential: nn.Sequential, options: Site) -> Iterator[tuple[nn.Module, Site]]:
    layers = [layer for layer in sequential if type(layer) is not nn.Identity]
    for layer, following in pairwise(layers):
        if isinstance(following, _WEIGHTED):
            yield layer, replace(options, output=_noted(following.parameters()))
        elif isinstance(following, _KEEP_NOTHING):
            yield layer, options
