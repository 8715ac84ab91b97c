"""Memory-saving layers: what backward does not read is not kept."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ..errors import PlanError
from .support.base import Effect, Exactness, Program, Run, Stage, Technique
from .support.facts import Facts

if TYPE_CHECKING:
    from torch import nn


class Layers(Technique):
    """Keep for backward only what it reads: bits of a ReLU, nothing of a frozen layer, no output that is had again.

    Source: Bhatia and Dangel 2024, arXiv:2404.12406.
    """

    name: ClassVar[str] = "layers"
    not_in_inference: ClassVar[str] = "it saves what backward needs"
    goes_by: ClassVar[str | None] = "saved tensors"
    stage: ClassVar[Stage] = Stage.LAYERS
    affects: ClassVar[frozenset[Effect]] = frozenset({"tensors", "code"})
    trades_time: ClassVar[bool] = True
    adds_up: ClassVar[Literal["blocks"]] = "blocks"
    rewrites: ClassVar[bool] = True
    purposes: ClassVar[Mapping[str, str]] = {
        "exact": "Keeps for backward only what it reads: bits, or nothing, instead of whole tensors.",
        "rounding": "The same, and keeps the derivatives of GELU and SiLU in 8 bits.",
        "recompute": "The same, and computes BatchNorm and ReLU again for the convolution behind them.",
    }

    kind: Literal["none", "exact", "rounding", "recompute"] = "none"
    """``none`` keeps what stock torch keeps; ``exact`` has the same values and gradients from less memory;
    ``rounding`` also keeps the derivatives of GELU and SiLU in 8 bits; ``recompute`` instead computes BatchNorm,
    residual sums and ReLU again for the convolution behind them."""
    spared: tuple[Annotated[int, Field(strict=True, ge=0)], ...] = ()
    """Numbers of blocks whose layers stay as they are, from 0 in the model's order; ascending, each once."""

    @model_validator(mode="after")
    def _check_spared(self) -> Layers:
        if self.kind == "none" and self.spared:
            raise ValueError(f"spared: kind none changes no layers, but got {[*self.spared]}. Use kind: exact.")
        if any(after <= before for before, after in itertools.pairwise(self.spared)):
            raise ValueError(f"spared: must ascend, each once, but got {[*self.spared]}. Use {sorted({*self.spared})}.")
        return self

    def describe(self, facts: Facts | None = None) -> str:
        """Layers, what they do beside saving, and where they are not."""
        if self.kind == "none":
            return super().describe(facts)
        beside = {"recompute": " that recompute norms", "rounding": " with 8-bit derivatives"}.get(self.kind, "")
        others = [number for number in range(facts.num_blocks if facts else 0) if number not in self.spared]
        if len(self.spared) > 2 * len(others) and facts is not None:
            where = " outside the blocks" + (f" and in {_blocks(others)}" if others else "")
        else:
            where = f" except in {_blocks(self.spared)}" if self.spared else ""
        return f"memory-saving layers{beside}{where}"

    @classmethod
    def choices(cls, facts: Facts) -> tuple[Layers, ...]:
        """None, exact and rounding for any model; recomputation where there are convolutions."""
        again = cls(kind="recompute")
        offered = (cls(), cls(kind="exact"), cls(kind="rounding"))
        return (*offered, again) if again.unavailable(facts) is None else offered

    def exactness(self, facts: Facts) -> Exactness:
        """A derivative in 8 bits is rounded."""
        return "rounding" if self.kind == "rounding" else "exact"

    def in_blocks(self, numbers: Sequence[int], num_blocks: int) -> Layers:
        """The others are spared."""
        if self.kind == "none":
            return self
        spared = tuple(number for number in range(num_blocks) if number not in numbers)
        return self.model_copy(update={"spared": spared})

    def numbers(self, num_blocks: int) -> tuple[int, ...]:
        """All but those that are spared."""
        return tuple(number for number in range(num_blocks) if self.kind != "none" and number not in self.spared)

    def unavailable(self, facts: Facts) -> str | None:
        """Only convolutions stand behind a BatchNorm, and there must be the blocks that are spared."""
        if self.spared and self.spared[-1] >= facts.num_blocks:
            return f"the model has {facts.num_blocks} blocks, numbered from 0, and no {self.spared[-1]}"
        if self.kind == "recompute" and not facts.conv_dims:
            return "the model has no convolutions, so that no BatchNorm stands before one"
        return None

    def options_of(self, program: Program) -> Mapping[str, Any]:
        """Other layers, and a compiler that would not call these, are off."""
        is_beside = self.kind != "none" and program == "Trainer"
        return {"use_liger_kernel": False, "torch_compile": False} if is_beside else {}

    @property
    def runs_model(self) -> bool:
        """It is seen who keeps what."""
        return self.kind != "none"

    def undo(self, model: nn.Module) -> nn.Module:
        """Stock layers."""
        from ..layers import restore

        restore(model)
        return model

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """Convert the model in place.

        Raises:
            PlanError: one of ``spared`` is beyond the model's blocks.
        """
        if self.kind == "none":
            return model
        from ..layers import convert

        if self.spared and self.spared[-1] >= len(blocks):
            raise PlanError(
                f"settings.layers.spared: must be numbers of the model's {len(blocks)} blocks, but got "
                f"{self.spared[-1]}. Use 0 to {len(blocks) - 1}, or leave it out."
            )
        kinds = {"recompute": self.kind == "recompute", "rounding": self.kind == "rounding"}
        convert(model, run, spared=[blocks[number] for number in self.spared], **kinds)
        return model

    @property
    def has_context(self) -> bool:
        """A loss may have layers, too."""
        return self.kind != "none"

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """Answer what the loss itself calls, such as a cross-entropy."""
        if not self.has_context:
            return nullcontext()
        from ..layers import answered

        return answered()


def _blocks(numbers: Sequence[int]) -> str:
    return f"block{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
