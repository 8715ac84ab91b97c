"""Reversible blocks: what they were given is found again from what they gave, and none of it is kept."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..errors import PlanError
from .support.base import Effect, Exactness, Run, Stage, Technique
from .support.facts import Facts
from .support.forwards import take_off

if TYPE_CHECKING:
    import torch
    from torch import nn

    from . import Settings


class Reversible(Technique):
    """Keep the outputs of the last of a row of reversible blocks alone, and compute the others again in backward.

    Source: Gomez et al. 2017, arXiv:1707.04585 (RevNet).
    """

    name: ClassVar[str] = "reversible"
    stage: ClassVar[Stage] = Stage.CHECKPOINTING
    affects: ClassVar[frozenset[Effect]] = frozenset({"tensors", "code"})
    trades_time: ClassVar[bool] = True
    rewrites: ClassVar[bool] = True
    not_in_scripts: ClassVar[str | None] = "a task alone says which blocks are reversible"
    purposes: ClassVar[Mapping[str, str]] = {
        "blocks": "Finds what reversible blocks were given from what they gave, in backward, and keeps none of it.",
    }

    kind: Literal["none", "blocks"] = "none"
    """``none`` is stock; ``blocks`` are those of the task's ``reversible_blocks``."""

    def describe(self, facts: Facts | None = None) -> str:
        """``12 blocks run reversibly``."""
        if self.kind == "none":
            return super().describe(facts)
        return f"{facts.num_reversible if facts else 'declared'} blocks run reversibly"

    @classmethod
    def facts_of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, device_type: str) -> Mapping[str, Any]:
        """How many the task says there are."""
        from .support.coupling import declared

        return {"num_reversible": len(declared(model))}

    @classmethod
    def choices(cls, facts: Facts) -> tuple[Reversible, ...]:
        """Both where there are such blocks."""
        return (cls(), cls(kind="blocks")) if facts.num_reversible else (cls(),)

    def exactness(self, facts: Facts) -> Exactness:
        """Inputs are found again but for rounding."""
        return "exact" if self.kind == "none" else "rounding"

    def unavailable(self, facts: Facts) -> str | None:
        """There must be such blocks."""
        if self.kind == "none" or facts.num_reversible:
            return None
        return "the task says of no block that it is reversible (reversible_blocks)"

    def conflicts(self, settings: Settings) -> str | None:
        """Who else decides what is kept of blocks, or stands between them."""
        if self.kind == "none":
            return None
        if settings.checkpointing.kind != "none":
            return "checkpointing computes the same blocks again: use one"
        if settings.offload.kind == "activations":
            return "nothing of the blocks is left to offload: use one"
        if settings.compile.kind != "none":
            return "a compiled program keeps what it chooses of each block: use one"
        if settings.parallel.kind in ("fsdp", "tensor"):
            return f"not tried with {settings.parallel.kind}: use ddp"
        return None

    def undo(self, model: nn.Module) -> nn.Module:
        """Blocks with their own forward."""
        from .support.coupling import coupled

        take_off(model, coupled)
        return model

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """Give the declared blocks a forward that finds its inputs again; it compares itself with their own the first
        time that it is called on numbers. Parameters, hooks and ``state_dict`` keys stay.

        Raises:
            PlanError: none are declared.
        """
        if self.kind == "none":
            return model
        from .support.coupling import Pair, coupled, declared

        found = declared(model)
        if not found:
            raise PlanError(
                "settings.reversible.kind: the task says of no block that it is reversible. Name them in it "
                '(reversible_blocks = ["encoder.blocks"]), or use kind: none.'
            )
        for block in found:
            # As in checkpointing: on the instance, and a bound method.
            block.forward = functools.partial(coupled, block.forward, Pair(block))
        return model
