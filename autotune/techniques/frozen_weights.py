"""Frozen weights: those that do not train are kept as codes, and made anew for each use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..errors import PlanError
from ..units import MIB, format_bytes
from .support.base import Effect, Exactness, Run, Stage
from .support.facts import Facts
from .support.lossy import Affects, Lossy

if TYPE_CHECKING:
    import torch
    from torch import nn

    from . import Settings

_LEAST_BYTES = 8 * MIB
"""Weights that take less are not worth it."""
_OF_SHARDS = "fsdp shares out each parameter, which codes were not tried with"


class FrozenWeights(Lossy):
    """In how many bits weights of linear layers and embeddings that do not train are kept.

    Source: Dettmers et al. 2023, arXiv:2305.14314 (QLoRA).
    """

    name: ClassVar[str] = "frozen_weights"
    goes_by: ClassVar[str | None] = "frozen weights"
    stage: ClassVar[Stage] = Stage.FROZEN
    affects: ClassVar[frozenset[Effect]] = Affects({"tensors", "code"}, {None, "none", "4bit"})  # type: ignore[assignment]
    trades_time: ClassVar[bool] = True
    only_where_listed: ClassVar[bool] = True
    rewrites: ClassVar[bool] = True
    not_in_scripts: ClassVar[str] = "the script's optimizer may hold the weights in full"
    purposes: ClassVar[Mapping[str, str]] = {
        "none": "Leaves weights that do not train as they are.",
        "8bit": "Keeps weights that do not train as 8-bit codes in blocks of 256: a quarter of their memory in fp32.",
        "4bit": "Keeps weights that do not train as 4-bit codes in blocks of 128: an eighth of their memory in fp32; "
        "the model computes something else.",
    }

    kind: Literal["none", "8bit", "4bit"] = "none"
    """``none`` is stock; the others keep them as codes, from which the numbers are made for each use."""

    def describe(self, facts: Facts | None = None) -> str:
        """``frozen weights in 8 bits``."""
        return (
            "frozen weights in full"
            if self.kind == "none"
            else f"frozen weights in {self.kind.replace('bit', '')} bits"
        )

    @classmethod
    def facts_of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, device_type: str) -> Mapping[str, Any]:
        """How large such weights are."""
        from .support.bits.freezing import frozen_weights

        return {"frozen_bytes": sum(weight.nbytes for weight in frozen_weights(model))}

    @classmethod
    def offered(cls, facts: Facts) -> Iterable[FrozenWeights]:
        """8 bits first."""
        return (cls(kind="8bit"), cls(kind="4bit"))

    def exactness(self, facts: Facts) -> Exactness:
        """Of a trained LLaMA, 8 bits changed outputs as much as bf16 did, adapters' gradients twice as much, and losses
        after 100 steps by 0.0003; 4 bits by up to 0.007 (``benchmarks.frozen_weights``)."""
        return "rounding" if self.kind == "8bit" else super().exactness(facts)

    def unavailable(self, facts: Facts) -> str | None:
        """4 bits must be allowed."""
        return self.obstacle(facts) if self.kind == "8bit" else super().unavailable(facts)

    def obstacle(self, facts: Facts) -> str | None:
        """There must be such weights, whole ones."""
        if facts.shared_by == "fsdp":
            return _OF_SHARDS
        if facts.inference and self.kind == "4bit":
            return (
                "`quantization: {kind: int4_weights}` does the same in inference, where its quality is judged"
                if facts.device.type == "cpu"
                else "4 bits were not tried in inference on a card"
            )
        if facts.frozen_bytes < _LEAST_BYTES:
            return (
                f"linear layers and embeddings have {format_bytes(facts.frozen_bytes)} that do not train, which is not "
                "worth it"
            )
        return None

    def beyond_script(self) -> str | None:
        """Its optimizer may have been built from the weights."""
        if self.kind == "none":
            return None
        return (
            "frozen_weights puts codes in the place of weights, which the script's optimizer may hold. Call "
            "autotune.apply_to_model(plan, model) in the script, before the optimizer is built."
        )

    def conflicts(self, settings: Settings) -> str | None:
        """Who takes weights for numbers in memory."""
        if self.kind == "none":
            return None
        if settings.parallel.kind == "fsdp":
            return f"{_OF_SHARDS}: use ddp"
        if settings.compile.kind != "none":
            return "a compiled program reads weights by itself, and would keep them in full: use one"
        return None

    def undo(self, model: nn.Module) -> nn.Module:
        """Weights in full, as they were rounded."""
        from .support.bits.freezing import thaw

        thaw(model)
        return model

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """Keep weights as codes; names, shapes, ``state_dict`` and what reads them stay.

        Raises:
            PlanError: all train.
        """
        if self.kind == "none":
            return model
        from .support.bits.freezing import freeze

        if not freeze(model, self.kind):
            raise PlanError(
                "settings.frozen_weights.kind: no weight of a linear layer or an embedding is frozen "
                "(requires_grad=False) when the plan is applied. Freeze them before, or use kind: none."
            )
        return model
