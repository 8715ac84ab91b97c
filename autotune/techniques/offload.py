"""Offload: what blocks save for backward is elsewhere until then."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from ..errors import PlanError
from .support.base import Effect, Run, Stage, Technique
from .support.facts import Facts

if TYPE_CHECKING:
    from torch import nn

    from . import Settings


class Offload(Technique):
    """Write what blocks save for backward to a file, and read it when backward comes to it.

    Source: Rhu et al. 2016, arXiv:1602.08124 (vDNN, to the host's memory).
    """

    name: ClassVar[str] = "offload"
    stage: ClassVar[Stage] = Stage.OFFLOAD
    affects: ClassVar[frozenset[Effect]] = frozenset({"tensors", "code"})
    trades_time: ClassVar[bool] = True
    only_where_listed: ClassVar[bool] = True
    adds_up: ClassVar[Literal["blocks"]] = "blocks"
    rewrites: ClassVar[bool] = True
    purposes: ClassVar[Mapping[str, str]] = {
        "activations": "Writes what blocks save for backward to a file, and reads it in backward.",
    }

    kind: Literal["none", "activations"] = "none"
    """``none`` is stock; ``activations`` writes what blocks save to a file."""
    blocks: tuple[Annotated[int, Field(strict=True, ge=0)], ...] = ()
    """Numbers of these blocks, from 0 in the model's order; ascending, each once. None are all of them."""

    @model_validator(mode="after")
    def _check_blocks(self) -> Offload:
        numbers = list(self.blocks)
        if self.kind == "none" and numbers:
            raise ValueError(f"blocks: kind none writes nothing, but got {numbers}. Use kind: activations.")
        if any(after <= before for before, after in itertools.pairwise(numbers)):
            raise ValueError(f"blocks: must ascend, each once, but got {numbers}. Use {sorted(set(numbers))}.")
        return self

    def describe(self, facts: Facts | None = None) -> str:
        """``activations of blocks 0 and 1 on disk``."""
        if self.kind == "none":
            return super().describe(facts)
        if not self.blocks:
            return "activations on disk"
        *before, last = map(str, self.blocks)
        named = f"blocks {', '.join(before)} and {last}" if before else f"block {last}"
        return f"activations of {named} on disk"

    @classmethod
    def choices(cls, facts: Facts) -> tuple[Offload, ...]:
        """None, and of all blocks."""
        other = cls(kind="activations")
        return (cls(), other) if other.unavailable(facts) is None else (cls(),)

    def in_blocks(self, numbers: Sequence[int], num_blocks: int) -> Offload:
        """Outside its blocks it does nothing."""
        if self.kind == "none" or not numbers:
            return type(self)()
        return type(self)(kind=self.kind, blocks=() if len(numbers) == num_blocks else tuple(numbers))

    def numbers(self, num_blocks: int) -> tuple[int, ...]:
        """All, where none are named."""
        if self.kind == "none":
            return ()
        return self.blocks or tuple(range(num_blocks))

    def unavailable(self, facts: Facts) -> str | None:
        """There must be the blocks, and they save in the host's memory."""
        if self.kind == "none":
            return None
        if facts.device.type != "cpu":
            return "what a card saves is not written to a file"
        if not facts.num_blocks:
            return "the model has 0 blocks"
        if self.blocks and self.blocks[-1] >= facts.num_blocks:
            return f"the model has {facts.num_blocks} blocks, numbered from 0, and no {self.blocks[-1]}"
        return None

    def conflicts(self, settings: Settings) -> str | None:
        """A compiled program saves by itself."""
        if self.kind != "none" and settings.compile.kind != "none":
            return "a compiled program keeps what it saves: use one"
        return None

    def undo(self, model: nn.Module) -> nn.Module:
        """Blocks with their own forward."""
        from .support.saved_to_disk import is_offloaded

        for module in model.modules():
            if is_offloaded(module):
                forward = vars(module).pop("forward")
                if module.forward != forward.args[0]:
                    module.forward = forward.args[0]
        return model

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """Give the blocks a forward that writes what they save; parameters, hooks and ``state_dict`` keys stay.

        Raises:
            PlanError: the model has no blocks, or not those.
        """
        if self.kind == "none":
            return model
        from .support.saved_to_disk import Disk, offloaded

        if not blocks:
            raise PlanError("settings.offload.kind: the model has no blocks that save. Use kind: none.")
        if self.blocks and self.blocks[-1] >= len(blocks):
            raise PlanError(
                f"settings.offload.blocks: must be numbers of the model's {len(blocks)} blocks, but got "
                f"{self.blocks[-1]}. Use 0 to {len(blocks) - 1}, or leave it out."
            )
        disk = Disk()
        for number in self.numbers(len(blocks)):
            block = blocks[number]
            block.forward = functools.partial(offloaded, block.forward, disk, block)
        return model
