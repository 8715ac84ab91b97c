"""Low rank: the weights of linear layers as products of two smaller ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ...errors import PlanError
from ..support.base import Run, Stage
from ..support.facts import Facts
from ..support.lossy import Lossy

if TYPE_CHECKING:
    import torch
    from torch import nn

_RATIOS = (0.25, 0.125)
"""That are worth trying: time follows parameters, and a square layer of half its rank has as many as before."""


class LowRank(Lossy):
    """Make two smaller linear layers of each, by its largest singular values.

    Source: Eckart and Young 1936, doi:10.1007/BF02288367.
    """

    name: ClassVar[str] = "low_rank"
    not_in_inference: ClassVar[str] = "what is cut recovers by training"
    stage: ClassVar[Stage] = Stage.LOW_RANK
    purposes: ClassVar[Mapping[str, str]] = {
        "none": "Leaves linear layers as they are.",
        "svd": "Makes two smaller layers of each linear one, by its largest singular values: a smaller model, which "
        "computes something else until it has been trained on.",
    }

    kind: Literal["none", "svd"] = "none"
    """``none`` keeps all; ``svd`` keeps the largest singular values."""
    rank_ratio: float = Field(default=0.25, gt=0, lt=1)
    """Rank over a layer's smaller side; a layer that it makes no smaller stays."""
    energy: float | None = Field(default=None, gt=0, lt=1)
    """In place of ``rank_ratio``: the share of the sum of squared singular values that is kept, layer by layer."""
    least_features: int = Field(default=64, ge=2)
    """Layers whose smaller side has fewer features stay."""
    untouchable: tuple[str, ...] = ()
    """Module paths that stay as they are, with all that is in them."""
    ranks: tuple[tuple[str, int], ...] | None = None
    """Of each layer that becomes two, its path and rank; absent, they are chosen anew."""

    @model_validator(mode="after")
    def _check_one_measure(self) -> Self:
        if self.energy is not None and self.rank_ratio != type(self).model_fields["rank_ratio"].default:
            raise ValueError(f"rank_ratio {self.rank_ratio:g} and energy {self.energy:g} exclude each other. Use one.")
        return self

    def describe(self, facts: Facts | None = None) -> str:
        """Of what rank."""
        if self.kind == "none":
            return "linear layers whole"
        chosen = self.model_dump(exclude_defaults=True, exclude={"kind", "rank_ratio", "energy", "ranks"})
        rest = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in chosen.items())
        what = f"{self.rank_ratio:.4g} of the rank" if self.energy is None else f"{self.energy:.4g} of the energy"
        return f"linear layers with {what}" + (f" ({rest})" if rest else "")

    @classmethod
    def facts_of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, device_type: str) -> Mapping[str, Any]:
        """How large linear layers are."""
        from ...pruning import linear_features

        return {"linear_features": linear_features(model)}

    @classmethod
    def offered(cls, facts: Facts) -> Iterable[Self]:
        """A quarter and an eighth of the rank."""
        return (cls(kind="svd", rank_ratio=ratio) for ratio in _RATIOS)

    def obstacle(self, facts: Facts) -> str | None:
        """It takes linear layers that are large enough, and samples that can be read again."""
        if facts.linear_features == 0:
            return "the model has no linear layers but those that are tied or make its output"
        if facts.linear_features < self.least_features:
            return (
                f"linear layers have at most {facts.linear_features} features, least_features is {self.least_features}"
            )
        if self.ranks is None and facts.dataset_kind == "iterable":
            return "layers that make the output are found on two samples, and an iterable dataset is read only once"
        return None

    def removed(self, facts: Facts) -> float:
        """Of a square layer's numbers, or of the energy."""
        if self.kind == "none":
            return 0.0
        return 1 - self.energy if self.energy is not None else max(1 - 2 * self.rank_ratio, 0.0)

    @property
    def runs_model(self) -> bool:
        """Layers that make the output are found so."""
        return self.kind != "none" and self.ranks is None

    @property
    def reads_values(self) -> bool:
        """Singular values decide on ranks where a share of them is asked for."""
        return self.energy is not None and self.ranks is None

    def as_applied(self, model: nn.Module) -> Self:
        """With the ranks that were chosen."""
        from ...pruning import factorised_by

        ranks = factorised_by(model) if self.kind != "none" else None
        return self if ranks is None else self.model_copy(update={"ranks": ranks})

    def undo(self, model: nn.Module) -> nn.Module:
        """What is gone cannot be had back.

        Raises:
            PlanError: an earlier plan has factorised the model.
        """
        from ...pruning import check_not_factorised

        check_not_factorised(model)
        return model

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """Put two factors in the place of weights, by the ranks that are given or, without them, chosen now.

        Raises:
            PlanError: no layer would become smaller, or the ranks are of another model.
        """
        if self.kind == "none":
            return model
        from ...pruning import Wanted, choose_ranks, factorise

        wanted = Wanted(self.rank_ratio, self.energy, self.least_features, self.untouchable)
        factorise(model, self.ranks if self.ranks is not None else choose_ranks(model, run, wanted))
        return model

    def on_optimizer(
        self, optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None
    ) -> torch.optim.Optimizer:
        """Factors are parameters of their own.

        Raises:
            PlanError: the optimizer was built before, and would train weights that are gone.
        """
        if self.kind == "none":
            return optimizer
        from ...pruning import is_replaced

        if any(is_replaced(parameter) for group in optimizer.param_groups for parameter in group["params"]):
            raise PlanError(
                "settings.low_rank: the optimizer holds weights that factors took the place of. Build it after the "
                "plan is on the model: pass apply a function of the parameters as optimizer."
            )
        return optimizer
