"""Optimizer state: what the optimizer keeps for each parameter, in fewer bits, or in the host's memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ...errors import PlanError
from ...units import MIB
from ..support.base import Effect, Exactness, Stage, Technique
from ..support.bits.kept_state import OF_SHARDS, kept_state_of, obstacles, piece_of
from ..support.bits.saved_state import STORES
from ..support.facts import Facts
from ..support.lossy import NOT_ALLOWED, Affects

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .. import Settings

Kind = Literal["default", "bf16", "8bit", "4bit", "factored", "host"]
_STATES: Mapping[str, Mapping[str, int]] = {
    "Adam": {"betas": 2, "amsgrad": 1},
    "AdamW": {"betas": 2, "amsgrad": 1},
    "Adamax": {"betas": 2},
    "NAdam": {"betas": 2},
    "RAdam": {"betas": 2},
    "RMSprop": {"alpha": 1, "momentum": 1},
    "SGD": {"momentum": 1},
}
"""Of the classes that update each element by itself: tensors of a parameter's size, by the option that asks for
them."""
_WHERE = {"8bit": "in 8 bits", "4bit": "in 4 bits", "factored": "factored", "host": "on the host"}
"""In words, by kind."""
_OF_SQUARES = ("Adam", "AdamW")
"""Classes whose averages of squares are kept as factors."""
_STATE_BYTES = 4
"""Of an element in fp32."""
_LEAST_BYTES = 32 * MIB
"""A state that takes less is no reason to trace every combination once more."""


class OptimizerState(Technique):
    """Where and in how many bits the optimizer keeps its averages between two steps; each computes in full precision.

    Source: Dettmers et al. 2021, arXiv:2110.02861; Li et al. 2023, arXiv:2309.01507; Shazeer and Stern 2018,
    arXiv:1804.04235 (Adafactor)
    """

    name: ClassVar[str] = "optimizer_state"
    not_in_inference: ClassVar[str] = "there is no optimizer"
    goes_by: ClassVar[str | None] = "optimizer state"
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    affects: ClassVar[frozenset[Effect]] = Affects({"tensors"}, {"factored"})  # type: ignore[assignment]
    trades_time: ClassVar[bool] = True
    adds_up: ClassVar[Literal["whole"]] = "whole"
    purposes: ClassVar[Mapping[str, str]] = {
        "bf16": "Keeps the optimizer's averages in bfloat16: half of their memory.",
        "8bit": "Keeps the optimizer's averages as 8-bit codes in blocks of 256: a quarter of their memory.",
        "4bit": "Keeps the optimizer's averages as 4-bit codes in blocks of 128: about an eighth of their memory.",
        "factored": "Keeps Adam's averages of squares as the means of rows and columns, as Adafactor does, and the "
        "others in 8 bits: about an eighth of their memory. The update is another.",
        "host": "Keeps the optimizer's averages in the host's memory, and none on the card. The CPU makes the step, on "
        "a copy of weights and gradients.",
    }

    kind: Kind = "default"
    """``default`` is as the optimizer's class has it; ``bf16``, ``8bit`` and ``4bit`` keep the state of larger
    parameters in fewer bits; ``factored`` keeps averages of squares by rows and columns, and the others in 8 bits;
    ``host``, for a card's job, keeps it in the host's memory."""

    def describe(self, facts: Facts | None = None) -> str:
        """``optimizer state in 8 bits``."""
        return f"optimizer state {_WHERE.get(self.kind, f'in {self.kind}')}"

    @classmethod
    def facts_of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, device_type: str) -> Mapping[str, Any]:
        """How much state there is."""
        return {"optimizer_states": _num_states(optimizer)}

    def prior_gain(self) -> tuple[float, float]:
        """On an H200 a LLaMA's step took 6.7 times as long with its state on the host (docs/evidence/advice.md)."""
        return (-1.2, 0.8) if self.kind == "host" else super().prior_gain()

    @classmethod
    def choices(cls, facts: Facts) -> tuple[OptimizerState, ...]:
        """Fewer bits, and a card's host, where the optimizer's class is known, and its state is worth it. Factors are
        for who lists them."""
        kinds: tuple[Kind, ...] = ("8bit", "4bit", "bf16", "host")
        others = (cls(kind=kind) for kind in kinds) if _state_bytes(facts) >= _LEAST_BYTES else ()
        return (cls(), *(one for one in others if one.unavailable(facts) is None))

    @classmethod
    def extremes(cls, choices: Sequence[Technique]) -> tuple[Technique, ...]:
        """The class's own, and the one of these that takes least: the others lie between."""
        kinds: tuple[Kind, ...] = ("host", "factored", "4bit", "8bit", "bf16")
        fewest = next((one for kind in kinds if (one := cls(kind=kind)) in choices), cls())
        return tuple(one for one in choices if one in (cls(), fewest))

    def exactness(self, facts: Facts) -> Exactness:
        """Averages are rounded, but on the host; factors are other numbers."""
        if self.kind == "factored":
            return "lossy"
        return "exact" if self.kind in ("default", "host") else "rounding"

    def unavailable(self, facts: Facts) -> str | None:
        """It takes a class that updates each element by itself, and whole parameters."""
        if self.kind == "default":
            return None
        if self.kind == "factored" and not facts.allow_lossy:
            return NOT_ALLOWED
        if self.kind == "host" and facts.device.type == "cpu":
            return _ON_HOST
        if facts.shared_by == "fsdp":
            return OF_SHARDS
        if facts.optimizer not in _STATES:
            return f"{facts.optimizer} is not known to update each element by itself from averages"
        if self.kind == "factored" and (facts.optimizer not in _OF_SQUARES or facts.optimizer_states > 2):
            return _OF_ADAM
        return None if facts.optimizer_states else f"{facts.optimizer} as it stands keeps no state"

    def host_cached_bytes(self, facts: Facts) -> int:
        """The state, and a piece of the weights and of their gradients."""
        if self.kind != "host" or facts.device.type == "cpu":
            return 0
        return _state_bytes(facts) + 2 * _STATE_BYTES * piece_of(facts.num_trainable)

    def conflicts(self, settings: Settings) -> str | None:
        """Each process has a part of each parameter."""
        is_sharded = self.kind != "default" and settings.parallel.kind in ("fsdp", "tensor")
        return f"{OF_SHARDS}: use ddp" if is_sharded else None

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
            kept.use(optimizer, self.kind if self.kind in STORES else None, on_host=self.kind == "host")
        return optimizer


_OF_ADAM = "factored takes Adam or AdamW without amsgrad, whose averages of squares rows and columns stand for"
_ON_HOST = "the state is on the host already, as all of a CPU's job is"


def _state_bytes(facts: Facts) -> int:
    """Of all that trains."""
    return facts.num_trainable * facts.optimizer_states * _STATE_BYTES


def _num_states(optimizer: torch.optim.Optimizer) -> int:
    rows = _STATES.get(type(optimizer).__name__, {})
    return max((sum(rows[name] for name in rows if group.get(name)) for group in optimizer.param_groups), default=0)


def _obstacles(optimizer: torch.optim.Optimizer, kind: Kind) -> Iterator[str]:
    from ...internals.fake_tensors import is_planned_for_card

    yield from obstacles(optimizer)
    name = type(optimizer).__name__
    if not _num_states(optimizer):
        yield f"{name} as it stands keeps no state"
    groups = optimizer.param_groups
    if kind == "host":
        if not is_planned_for_card() and all(one.device.type == "cpu" for group in groups for one in group["params"]):
            yield _ON_HOST
    elif any(group.get("centered") for group in groups):
        yield "a centered RMSprop takes the root of a difference, which rounding may make negative"
    if kind == "factored" and (name not in _OF_SQUARES or any(group.get("amsgrad") for group in groups)):
        yield _OF_ADAM
