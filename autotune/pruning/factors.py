"""Linear layers as products of two: which ones, of what rank, and the layer that takes their place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import PlanError
from .child import untouchable_modules
from .observe import observe

_MARK = "_autotune_low_rank"
"""Where a factorised model has the ranks that were chosen."""
_REPLACED: Any = WeakTensorKeyDictionary()
"""Weights that factors took the place of."""
Ranks = tuple[tuple[str, int], ...]
"""Paths of linear layers with the rank of each."""


class LowRankLinear(nn.Module):
    """``x @ down.T @ up.T + bias``: a linear layer whose weight is a product of two."""

    def __init__(self, up: nn.Parameter, down: nn.Parameter, bias: nn.Parameter | None) -> None:
        """
        Args:
            up: (out_features, rank).
            down: (rank, in_features).
            bias: (out_features,).
        """
        super().__init__()
        self.up, self.down, self.bias = up, down, bias
        (self.out_features, self.rank), self.in_features = up.shape, down.shape[1]

    @property
    def weight(self) -> Tensor:
        """(out_features, in_features), for code that reads it; a forward pass does not."""
        return self.up @ self.down

    def forward(self, x: Tensor) -> Tensor:
        """(…, in_features) to (…, out_features)."""
        return F.linear(F.linear(x, self.down), self.up, self.bias)

    def extra_repr(self) -> str:
        """Its sizes."""
        return f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}"


@dataclass(frozen=True)
class Wanted:
    """What is asked of a factorisation."""

    rank_ratio: float
    """Rank over the smaller side of a layer."""
    energy: float | None
    """In its place: the share of the sum of squared singular values that is kept."""
    least_features: int
    """Layers whose smaller side is less stay."""
    untouchable: tuple[str, ...]
    """Module paths that stay, with what is in them."""


def linear_features(model: nn.Module) -> int:
    """The smaller side of the layer where that is largest, of those that can be factorised; 0 where there is none.

    The last one aside: as a rule it makes the output.
    """
    return max((min(_weight(module).shape) for _, module in [*_own_weights(model)][:-1]), default=0)


def choose_ranks(model: nn.Module, run: Callable[[nn.Module], Any] | None, wanted: Wanted) -> Ranks:
    """Of each layer that is worth it, the rank.

    Args:
        model: is left alone.
        run: its forward and loss on a few samples.
        wanted: what is asked.

    Raises:
        PlanError: the layers that make its output cannot be found, or no layer would become smaller.
    """
    if run is None:
        raise PlanError(
            "settings.low_rank: layers that make the output stay, which are found by running the model, and there is "
            "no sample to run it on: an iterable dataset is read only once. Pass run= to apply_to_model, give a "
            "map-style dataset, or use kind: none."
        )
    stay = {*untouchable_modules(model, wanted.untouchable, "settings.low_rank.untouchable")} | _last(model, run)
    layers = [(path, module) for path, module in _own_weights(model) if module not in stay]
    large = [(path, module) for path, module in layers if min(_weight(module).shape) >= wanted.least_features]
    ranks = tuple((path, rank) for path, module in large if _saves(rank := _rank(module, wanted), module))
    if not ranks:
        raise PlanError(f"settings.low_rank: {_saves_nothing([module for _, module in layers], wanted)}")
    return ranks


@torch.no_grad()
def factorise(model: nn.Module, ranks: Ranks) -> None:
    """Put two factors in the place of each of these layers' weights, in place: the best approximation of that rank.

    Args:
        model: has these layers.
        ranks: as :func:`choose_ranks` returns them.

    Raises:
        PlanError: the ranks are of another model, whose layers have other names or sizes; nothing was touched.
    """
    modules = dict(_own_weights(model))
    for path, rank in ranks:
        if path not in modules or not 1 <= rank <= min(_weight(modules[path]).shape):
            raise PlanError(
                f"settings.low_rank.ranks: they are another model's: this one has no linear layer {path} of at least "
                f"{rank} features. Give the model that the plan was found for, or leave ranks out to choose anew."
            )
    for path, rank in ranks:
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, _factorised(modules[path], rank))
    setattr(model, _MARK, ranks)


def factorised_by(model: nn.Module) -> Ranks | None:
    """The ranks that a model, or one that it is around, was factorised by; None where it was not."""
    return next((vars(module)[_MARK] for module in model.modules() if _MARK in vars(module)), None)


def check_not_factorised(model: nn.Module) -> None:
    """
    Raises:
        PlanError: an earlier plan has factorised the model.
    """
    if factorised_by(model) is not None:
        raise PlanError(
            "settings.low_rank: the model's layers are factorised already, which cannot be taken back. Build it anew."
        )


def is_replaced(weight: Tensor) -> bool:
    """Whether factors took the place of this weight."""
    return weight in _REPLACED


def _own_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Linear layers, by path, whose weight is nobody else's, and that are no subclass with a forward of its own."""
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    for path, module in model.named_modules():
        if path and (type(module) is nn.Linear or _is_conv1d(module)) and uses.get(id(module.weight)) == 1:
            yield path, module


def _is_conv1d(module: nn.Module) -> bool:
    """transformers' linear layer with a transposed weight."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _weight(module: nn.Module) -> Tensor:
    """(out_features, in_features)."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach().T if _is_conv1d(module) else weight.detach()


def _last(model: nn.Module, run: Callable[[nn.Module], Any]) -> set[nn.Module]:
    """Layers that make the output."""
    twin = copy.deepcopy(model).requires_grad_(True)  # running it changes BatchNorm's statistics
    last = observe(twin, run).last
    return {model.get_submodule(path) for path, module in twin.named_modules() if module in last}


def _rank(module: nn.Module, wanted: Wanted) -> int:
    weight = _weight(module)
    if wanted.energy is None:
        return max(1, int(min(weight.shape) * wanted.rank_ratio))
    values, _ = _spectrum(weight)
    kept = values.cumsum(0) / values.sum().clamp_min(torch.finfo(values.dtype).tiny)
    return min(int((kept < wanted.energy).sum()) + 1, len(values))


def _saves(rank: int, module: nn.Module) -> bool:
    rows, columns = _weight(module).shape
    return rank * (rows + columns) < rows * columns


def _saves_nothing(layers: list[nn.Module], wanted: Wanted) -> str:
    """Why no layer becomes smaller, and what to do."""
    if not layers:
        return "the model has no linear layers that are not tied, untouchable, or make its output. Use kind: none."
    what = f"energy {wanted.energy:g}" if wanted.energy is not None else f"rank_ratio {wanted.rank_ratio:g}"
    return (
        f"{what} makes no layer smaller: {len(layers)} linear layers beside the output's have at most "
        f"{max(min(_weight(one).shape) for one in layers)} features on the smaller side, and least_features is "
        f"{wanted.least_features}. Use less of either, or kind: none."
    )


def _spectrum(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Squared singular values, descending, and the vectors of the smaller side: of the product with its transpose,
    which takes a fifth of the time of a singular value decomposition."""
    wide = weight.double().nan_to_num(0.0, 0.0, 0.0)  # a model that is only traced has whatever values
    wide = wide if wide.shape[0] <= wide.shape[1] else wide.T
    values, vectors = torch.linalg.eigh(wide @ wide.T)
    return values.flip(0).clamp_min(0), vectors.flip(1)


def _factorised(module: nn.Module, rank: int) -> LowRankLinear:
    """Both factors of the same size, so that they learn alike; of a layer of zeros, one of them is no zero."""
    weight = _weight(module)
    values, vectors = _spectrum(weight)
    left = vectors[:, :rank]
    tall = weight.shape[0] > weight.shape[1]
    right = left.T @ (weight.T if tall else weight).double()
    sizes = values[:rank].sqrt().sqrt()
    scale = torch.where(sizes > 1e-6 * sizes.max(), sizes, 1.0)
    left, right = left * scale, right / scale[:, None]
    up, down = (right.T, left.T) if tall else (left, right)
    old = module.weight
    assert isinstance(old, nn.Parameter)
    bias = module.bias
    assert bias is None or isinstance(bias, nn.Parameter)
    _REPLACED[old] = True
    one, other = (nn.Parameter(factor.to(weight.dtype).contiguous(), old.requires_grad) for factor in (up, down))
    return LowRankLinear(one, other, bias).train(module.training)
