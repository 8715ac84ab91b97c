"""Offload: what blocks save for backward is elsewhere until then, or their weights are until they are used."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from ..errors import PlanError
from ..units import MIB, format_bytes
from .support.base import Effect, FileKind, Run, Stage, Technique
from .support.facts import Facts
from .support.forwards import take_off

if TYPE_CHECKING:
    import torch
    from torch import nn

    from . import Settings

_PLACES: tuple[Literal["disk", "host"], ...] = ("disk", "host")
_LEAST_BYTES = MIB
"""Weights that take less are not worth it."""
_FP32_BYTES = 4
_OF_BACKWARD = "activations are what backward needs"
_OF_SHARDS = "several processes share out each parameter"


class Offload(Technique):
    """Have what blocks save for backward, or weights of theirs, in a file or in a card's host's memory between uses.

    Source: Rhu et al. 2016, arXiv:1602.08124 (vDNN, to the host's memory); of weights, Ren et al. 2021,
    arXiv:2101.06840 (ZeRO-Offload).
    """

    name: ClassVar[str] = "offload"
    goes_by: ClassVar[str | None] = "offloaded weights"
    stage: ClassVar[Stage] = Stage.OFFLOAD
    affects: ClassVar[frozenset[Effect]] = frozenset({"tensors", "code"})
    trades_time: ClassVar[bool] = True
    only_where_listed: ClassVar[bool] = True
    adds_up: ClassVar[Literal["blocks"]] = "blocks"
    rewrites: ClassVar[bool] = True
    purposes: ClassVar[Mapping[str, str]] = {
        "activations": "Writes what blocks save for backward to a file, or copies it from a card to the host's memory, "
        "and has it again in backward.",
        "parameters": "Keeps blocks' weights that do not train in a file, and reads each when it is used; or in the "
        "memory of a card's host, from where they come two blocks ahead. With ``trained``, all of them are there, and "
        "their optimizer's state.",
    }

    kind: Literal["none", "activations", "parameters"] = "none"
    """``none`` is stock; ``activations`` moves what blocks save, ``parameters`` their weights."""
    to: Literal["disk", "host"] = "disk"
    """``disk``, of a CPU's job, is a file; ``host``, of a card's, is the host's pinned memory."""
    blocks: tuple[Annotated[int, Field(strict=True, ge=0)], ...] = ()
    """Numbers of these blocks, from 0 in the model's order; ascending, each once. None are all of them."""
    trained: bool = False
    """Whether weights that train are moved too, with their optimizer's state, which ``optimizer_step: in_backward``
    updates one after the other."""

    @model_validator(mode="after")
    def _check_blocks(self) -> Offload:
        numbers = list(self.blocks)
        if self.kind == "none" and numbers:
            raise ValueError(f"blocks: kind none writes nothing, but got {numbers}. Use another kind.")
        if any(after <= before for before, after in itertools.pairwise(numbers)):
            raise ValueError(f"blocks: must ascend, each once, but got {numbers}. Use {sorted(set(numbers))}.")
        if self.to == "host" and self.kind == "none":
            raise ValueError("to: kind none moves nothing, but got host. Use another kind, or leave it out.")
        if self.trained and self.kind != "parameters":
            raise ValueError(f"trained: is of kind parameters, but got kind {self.kind}. Leave it out.")
        return self

    def describe(self, facts: Facts | None = None) -> str:
        """``activations of blocks 0 and 1 on disk``."""
        where = "on disk" if self.to == "disk" else "on the host"
        if self.kind == "none":
            return super().describe(facts)
        what = "weights and optimizer state" if self.trained else self.kind
        if not self.blocks:
            return f"{what} {where}"
        *before, last = map(str, self.blocks)
        named = f"blocks {', '.join(before)} and {last}" if before else f"block {last}"
        return f"{what} of {named} {where}"

    def prior_gain(self) -> tuple[float, float]:
        """By a link to a card: steps on an H200 took 1.02 to 3.6 times as long (docs/inside/techniques.md)."""
        return (-0.6, 0.6) if self.to == "host" else super().prior_gain()

    @classmethod
    def choices(cls, facts: Facts) -> tuple[Offload, ...]:
        """None, and of all blocks."""
        kinds: tuple[Literal["activations", "parameters"], ...] = ("activations", "parameters")
        others = (cls(kind=kind, to=to) for kind in kinds for to in _PLACES)
        return (cls(), *(one for one in others if one.unavailable(facts) is None))

    def in_blocks(self, numbers: Sequence[int], num_blocks: int) -> Offload:
        """Outside its blocks it does nothing."""
        if self.kind == "none" or not numbers:
            return type(self)()
        return self.model_copy(update={"blocks": () if len(numbers) == num_blocks else tuple(numbers)})

    def numbers(self, num_blocks: int) -> tuple[int, ...]:
        """All, where none are named."""
        if self.kind == "none":
            return ()
        return self.blocks or tuple(range(num_blocks))

    def unavailable(self, facts: Facts) -> str | None:
        """There must be the blocks, and another place for what they save; or weights that do not train."""
        if self.kind == "none":
            return None
        if facts.device.type != "cpu" and self.to == "disk":
            return f"a card's {self.kind} are not written to a file: use to: host"
        if facts.device.type == "cpu" and self.to == "host":
            return f"a CPU's {self.kind} are on the host already"
        if not facts.num_blocks:
            return "the model has 0 blocks"
        if self.blocks and self.blocks[-1] >= facts.num_blocks:
            return f"the model has {facts.num_blocks} blocks, numbered from 0, and no {self.blocks[-1]}"
        if facts.inference and (reason := self.beyond_inference()) is not None:
            return reason
        if facts.inference and self.trained:
            return "a plan for inference moves all weights: leave trained out"
        takes_all = facts.inference or self.trained
        moved = _FP32_BYTES * facts.num_parameters if takes_all else facts.frozen_bytes
        if self.kind == "parameters" and moved < _LEAST_BYTES:
            which = "" if takes_all else " that do not train"
            return f"weights have {format_bytes(moved)}{which}, which is not worth it"
        if self.kind == "parameters" and facts.shared_by == "fsdp":
            return _OF_SHARDS
        return None

    def fills_host(self, facts: Facts) -> bool:
        """By what a step saves, or by weights: a trace knows how much."""
        return self.to == "host"

    def conflicts(self, settings: Settings) -> str | None:
        """A compiled program saves, and reads weights, by itself."""
        if self.kind == "none":
            return None
        if settings.compile.kind != "none":
            kept = "what it saves" if self.kind == "activations" else "the weights that it reads"
            return f"a compiled program keeps {kept}: use one"
        if self.kind == "activations":
            return None
        if self.trained and settings.optimizer_step.kind != "in_backward":
            return "weights that train are fetched and written one by one: use optimizer_step: in_backward"
        if self.trained and settings.trained_weights.kind != "none":
            return "trained_weights rounds those that are in memory: use one"
        if self.trained and self.to == settings.optimizer_state.kind:
            return "optimizer_state keeps the same state on the host: use one"
        if settings.frozen_weights.kind != "none":
            return "frozen_weights keeps the same weights as codes in memory: use one"
        if settings.quantization.kind != "none":
            return "quantization keeps integers of the same weights in memory: use one"
        if settings.checkpointing.kind == "selective":
            return "selective checkpointing counts what operations keep, which is none of these: use kind blocks"
        if settings.parallel.kind in ("fsdp", "tensor"):
            return f"{_OF_SHARDS}: use ddp"
        return None

    def beyond_inference(self) -> str | None:
        """There is nothing to keep for backward."""
        return _OF_BACKWARD if self.kind == "activations" else None

    def beyond_script(self) -> str | None:
        """Its optimizer may have been built from the weights."""
        if self.kind != "parameters":
            return None
        return (
            "offload of parameters puts others in the place of weights, which the script's optimizer may hold. Call "
            "autotune.apply_to_model(plan, model) in the script, before the optimizer is built."
        )

    def not_in_file(self, kind: FileKind) -> str | None:
        """It has all weights."""
        return None if self.kind == "none" else "the file has all weights, and its runtime where they are"

    def undo(self, model: nn.Module) -> nn.Module:
        """Blocks with their own forward, and weights in memory."""
        from .support.disk.offloading import bring_back
        from .support.disk.saved_elsewhere import offloaded

        bring_back(model)
        take_off(model, offloaded)
        return model

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """Give the blocks a forward that writes what they save, or weights that are fetched; names of parameters,
        hooks and ``state_dict`` stay.

        Raises:
            PlanError: the model has no blocks, or not those, or all their weights train, or one that does is held
                elsewhere or has hooks; or they are to lie on the host of a card, and there is none.
        """
        return self._put_on(model, blocks)

    def on_inference(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """The same, also of weights that train."""
        return self._put_on(model, blocks, in_inference=True)

    def on_optimizer(
        self, optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None
    ) -> torch.optim.Optimizer:
        """The same: ``optimizer_step`` updates what is offloaded.

        Raises:
            PlanError: it has weights that the model no longer has.
        """
        from .support.disk.offloading import is_replaced

        if any(is_replaced(one) for group in optimizer.param_groups for one in group["params"]):
            raise PlanError(
                "settings.offload: the optimizer has weights in whose place there are others since, and would train "
                "nothing. Build it from the parameters of the model that apply_to_model returned."
            )
        return optimizer

    def _put_on(self, model: nn.Module, blocks: Sequence[nn.Module], in_inference: bool = False) -> nn.Module:
        if self.kind == "none":
            return model
        import torch

        from ..internals.fake_tensors import is_planned_for_card
        from .support.disk.offloading import offload
        from .support.disk.saved_elsewhere import Place, offloaded
        from .support.disk.saved_to_disk import Disk
        from .support.disk.saved_to_host import Host

        if not blocks:
            raise PlanError("settings.offload.kind: the model has no blocks. Use kind: none.")
        if self.blocks and self.blocks[-1] >= len(blocks):
            raise PlanError(
                f"settings.offload.blocks: must be numbers of the model's {len(blocks)} blocks, but got "
                f"{self.blocks[-1]}. Use 0 to {len(blocks) - 1}, or leave it out."
            )
        if self.to == "host" and not (is_planned_for_card() or torch.cuda.is_available()):
            raise PlanError(
                "settings.offload.to: host is the memory of a card's host, and no card is here: "
                "torch.cuda.is_available() is False. Use to: disk."
            )
        named = [blocks[number] for number in self.numbers(len(blocks))]
        if self.kind == "parameters":
            if not offload(model, named, in_inference, self.trained, to_host=self.to == "host"):
                where = "on the CPU or a card and in no other block" if self.to == "host" else "on the CPU"
                raise PlanError(
                    f"settings.offload.kind: these blocks have no weight of 64 KiB or more {where} that is "
                    f"frozen (requires_grad=False) when the plan is applied; what trains stays in memory, but "
                    "for inference and with trained: true. Freeze weights before, name other blocks, or use kind: none."
                )
            return model
        place: Place = Disk() if self.to == "disk" else Host()
        for block in named:
            block.forward = functools.partial(offloaded, block.forward, place, block)
        return model
