"""Optimizer state: what the optimizer keeps for each parameter, in fewer bits, or in the host's memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ...errors import PlanError
from ...units import MIB
from ..support.base import Effect, Exactness, Stage, Technique
from ..support.bits.kept_state import kept_state_of, piece_of
from ..support.bits.saved_state import STORES
from ..support.facts import Facts

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .. import Settings

Kind = Literal["default", "bf16", "8bit", "4bit", "host"]
_STATES: Mapping[str, Mapping[str, int]] = {
    "Adam": {"betas": 2, "amsgrad": 1},
    "AdamW": {"betas": 2, "amsgrad": 1},
    "Adamax": {"betas": 2},
    "NAdam": {"betas": 2},
    "RAdam": {"betas": 2},
    "RMSprop": {"alpha": 1, "momentum": 1},
    "SGD": {"momentum": 1},
}
"""Of torch's classes that update each element by itself: tensors of a parameter's size, by the option that asks for
them. Left out are those whose state is a sum, to which what a step adds soon rounds to nothing (Adagrad)."""
_WHERE = {"8bit": "in 8 bits", "4bit": "in 4 bits", "host": "on the host"}
"""In words, by kind."""
_STATE_BYTES = 4
"""Of an element in fp32."""
_LEAST_BYTES = 32 * MIB
"""A state that takes less is no reason to trace every combination once more."""


class OptimizerState(Technique):
    """Where and in how many bits the optimizer keeps its averages between two steps; each computes in full precision.

    Source: Dettmers et al. 2021, arXiv:2110.02861; Li et al. 2023, arXiv:2309.01507
    """

    name: ClassVar[str] = "optimizer_state"
    goes_by: ClassVar[str | None] = "optimizer state"
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    affects: ClassVar[frozenset[Effect]] = frozenset({"tensors"})
    trades_time: ClassVar[bool] = True
    adds_up: ClassVar[Literal["whole"]] = "whole"
    purposes: ClassVar[Mapping[str, str]] = {
        "bf16": "Keeps the optimizer's averages in bfloat16: half of their memory.",
        "8bit": "Keeps the optimizer's averages as 8-bit codes in blocks of 256: a quarter of their memory.",
        "4bit": "Keeps the optimizer's averages as 4-bit codes in blocks of 128: about an eighth of their memory.",
        "host": "Keeps the optimizer's averages in the host's memory, and none on the card. The CPU makes the step, on "
        "a copy of weights and gradients.",
    }

    kind: Kind = "default"
    """``default`` is as the optimizer's class has it; ``bf16``, ``8bit`` and ``4bit`` keep the state of larger
    parameters in fewer bits; ``host``, for a card's job, keeps it in the host's memory."""

    def describe(self, facts: Facts | None = None) -> str:
        """``optimizer state in 8 bits``."""
        return f"optimizer state {_WHERE.get(self.kind, f'in {self.kind}')}"

    @classmethod
    def facts_of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, device_type: str) -> Mapping[str, Any]:
        """How much state there is."""
        return {"optimizer_states": _num_states(optimizer)}

    @classmethod
    def choices(cls, facts: Facts) -> tuple[OptimizerState, ...]:
        """Fewer bits, and a card's host, where the optimizer's class is known, and its state is worth it."""
        kinds: tuple[Kind, ...] = ("8bit", "4bit", "bf16", "host")
        others = (cls(kind=kind) for kind in kinds) if _state_bytes(facts) >= _LEAST_BYTES else ()
        return (cls(), *(one for one in others if one.unavailable(facts) is None))

    @classmethod
    def extremes(cls, choices: Sequence[Technique]) -> tuple[Technique, ...]:
        """The class's own, and the one of these that takes least: the others lie between."""
        kinds: tuple[Kind, ...] = ("host", "4bit", "8bit", "bf16")
        fewest = next((one for kind in kinds if (one := cls(kind=kind)) in choices), cls())
        return tuple(one for one in choices if one in (cls(), fewest))

    def exactness(self, facts: Facts) -> Exactness:
        """Averages are rounded, but on the host."""
        return "exact" if self.kind in ("default", "host") else "rounding"

    def unavailable(self, facts: Facts) -> str | None:
        """It takes a class that updates each element by itself, and whole parameters."""
        if self.kind == "default":
            return None
        if self.kind == "host" and facts.device.type == "cpu":
            return _ON_HOST
        if facts.shared_by == "fsdp":
            return _OF_SHARDS
        if facts.optimizer not in _STATES:
            return f"{facts.optimizer} is not known to update each element by itself from averages"
        return None if facts.optimizer_states else f"{facts.optimizer} as it stands keeps no state"

    def host_cached_bytes(self, facts: Facts) -> int:
        """The state, and a piece of the weights and of their gradients."""
        if self.kind != "host" or facts.device.type == "cpu":
            return 0
        return _state_bytes(facts) + 2 * _STATE_BYTES * piece_of(facts.num_trainable)

    def conflicts(self, settings: Settings) -> str | None:
        """Each process has a part of each parameter."""
        is_sharded = self.kind != "default" and settings.parallel.kind in ("fsdp", "tensor")
        return f"{_OF_SHARDS}: use ddp" if is_sharded else None

    def on_optimizer(
        self, optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None
    ) -> torch.optim.Optimizer:
        """Keep its state so from now on. The default takes off what an earlier plan put on, and lets it load what was
        saved with one.

        Raises:
            PlanError: it is none of the classes that update each element by itself, or its parameters are on the host.
        """
        kept = kept_state_of(optimizer)
        if self.kind != "default" and (reason := next(_obstacles(optimizer, self.kind), None)) is not None:
            raise PlanError(f"settings.optimizer_state.kind: {self.kind}: {reason}. Use kind: default.")
        if kept is not None:
            kept.use(optimizer, STORES.get(self.kind), on_host=self.kind == "host")
        return optimizer


_OF_SHARDS = "fsdp and tensor share out parameters and their state, which was tried as the optimizer has it alone"
_ON_HOST = "the state is on the host already, as all of a CPU's job is"


def _state_bytes(facts: Facts) -> int:
    """Of all that trains."""
    return facts.num_trainable * facts.optimizer_states * _STATE_BYTES


def _num_states(optimizer: torch.optim.Optimizer) -> int:
    rows = _STATES.get(type(optimizer).__name__, {})
    return max((sum(rows[name] for name in rows if group.get(name)) for group in optimizer.param_groups), default=0)


def _obstacles(optimizer: torch.optim.Optimizer, kind: Kind) -> Iterator[str]:
    import torch

    from ...internals.fake_tensors import is_planned_for_card

    name = type(optimizer).__name__
    if name not in _STATES or type(optimizer) is not getattr(torch.optim, name, None):
        yield f"it takes {', '.join(_STATES)} of torch's own, which update each element by itself, but got {name}"
    elif not _num_states(optimizer):
        yield f"{name} as it stands keeps no state"
    groups = optimizer.param_groups
    if kind == "host":
        if not is_planned_for_card() and all(one.device.type == "cpu" for group in groups for one in group["params"]):
            yield _ON_HOST
    elif any(group.get("centered") for group in groups):
        yield "a centered RMSprop takes the root of a difference, which rounding may make negative"
    if any(group.get("differentiable") for group in groups):
        yield "the optimizer is differentiable, and its state is not kept in full"
    if any(hasattr(parameter, "device_mesh") for group in groups for parameter in group["params"]):
        yield _OF_SHARDS
