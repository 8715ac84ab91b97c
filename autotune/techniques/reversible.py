"""Reversible blocks: what they were given is found again from what they gave, and none of it is kept."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

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
    not_in_inference: ClassVar[str] = "it saves what backward needs"
    not_in_scripts: ClassVar[str | None] = "a task alone says which blocks are reversible"
    purposes: ClassVar[Mapping[str, str]] = {
        "blocks": "Finds what reversible blocks were given from what they gave, in backward, and keeps none of it.",
    }

    kind: Literal["none", "blocks"] = "none"
    """``none`` is stock; ``blocks`` has blocks run reversibly."""
    paths: tuple[str, ...] = ()
    """Module paths of the blocks, or of containers of them; empty are those of the task's ``reversible_blocks``."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.paths and self.kind == "none":
            raise ValueError(f"paths: kind none names no blocks, but got {', '.join(self.paths)}. Use kind: blocks.")
        return self

    def describe(self, facts: Facts | None = None) -> str:
        """``blocks of encoder.layers run reversibly``."""
        if self.kind == "none":
            return super().describe(facts)
        return f"blocks of {', '.join(self.paths) or 'reversible_blocks'} run reversibly"

    @classmethod
    def facts_of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, device_type: str) -> Mapping[str, Any]:
        """What the task names."""
        from .support.reversible.pair import declared

        return {"reversible_blocks": tuple(declared(model))}

    @classmethod
    def choices(cls, facts: Facts) -> tuple[Reversible, ...]:
        """Both where there are such blocks."""
        return (cls(), cls(kind="blocks").or_default(facts)) if facts.reversible_blocks else (cls(),)

    def or_default(self, facts: Facts) -> Reversible:
        """With the paths that the task names, so that a plan is enough where there is no task."""
        is_open = self.kind == "blocks" and not self.paths
        return type(self)(kind=self.kind, paths=facts.reversible_blocks) if is_open else self

    def exactness(self, facts: Facts) -> Exactness:
        """Inputs are found again but for rounding."""
        return "exact" if self.kind == "none" else "rounding"

    def unavailable(self, facts: Facts) -> str | None:
        """There must be such blocks."""
        if self.kind == "none" or self.paths or facts.reversible_blocks:
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
        if settings.variant.kind != "none":
            return "a variant's blocks are not those that the task says are reversible: use one"
        if settings.parallel.kind in ("fsdp", "tensor"):
            return f"not tried with {settings.parallel.kind}: use ddp"
        return None

    def undo(self, model: nn.Module) -> nn.Module:
        """Blocks with their own forward."""
        from .support.reversible.coupling import coupled

        take_off(model, coupled)
        return model

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """Give the blocks a forward that finds its inputs again; it compares itself with their own the first time that
        it is called on numbers. Parameters, hooks and ``state_dict`` keys stay.

        Raises:
            PlanError: none are named.
            TaskError: a path names no module of the model, or one without ``f`` and ``g``.
        """
        if self.kind == "none":
            return model
        from .support.reversible.coupling import coupled
        from .support.reversible.pair import Pair, declared, reversible_blocks

        paths = self.paths or declared(model)
        if not paths:
            raise PlanError(
                "settings.reversible.kind: nothing says which blocks are reversible. Name them in the plan "
                "(reversible: {kind: blocks, paths: [encoder.blocks]}), or in the task (reversible_blocks = "
                '["encoder.blocks"]), or use kind: none.'
            )
        for block in reversible_blocks(model, paths, "settings.reversible.paths"):
            # As in checkpointing: on the instance, and a bound method.
            block.forward = functools.partial(coupled, block.forward, Pair(block))
        return model
