"""Optimizer implementation: the same update as one loop, grouped kernels, or one fused kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ...errors import PlanError
from ..support.base import Effect, Program, Stage, Technique
from ..support.facts import Facts

if TYPE_CHECKING:
    import torch
    from torch import nn

Implementation = Literal["default", "for_loop", "foreach", "fused"]
_FLAGS: dict[str, dict[str, bool]] = {
    "for_loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}


class Optimizer(Technique):
    """How the user's optimizer computes its update; which optimizer, and its hyper-parameters, stay the user's."""

    name: ClassVar[str] = "optimizer"
    not_in_inference: ClassVar[str] = "there is no optimizer"
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    affects: ClassVar[frozenset[Effect]] = frozenset({"update"})
    purposes: ClassVar[Mapping[str, str]] = {
        "foreach": "One grouped kernel per operation of the update; the same arithmetic.",
        "fused": "The whole update in one kernel; the same arithmetic.",
        "for_loop": "One parameter at a time: no temporaries the size of the model.",
    }

    kind: Implementation = "default"
    """``default`` is as the user built it; ``foreach`` needs temporaries the size of the parameters."""

    def describe(self, facts: Facts | None = None) -> str:
        """``fused optimizer``."""
        return f"{self.kind.replace('_', '-')} optimizer"

    @classmethod
    def facts_of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, device_type: str) -> Mapping[str, Any]:
        """Its class, and what that supports."""
        return {
            "optimizer": type(optimizer).__name__,
            "optimizer_implementations": supported_implementations(optimizer),
            "optimizer_implementation": implementation_of(optimizer),
        }

    @classmethod
    def choices(cls, facts: Facts) -> tuple[Optimizer, ...]:
        """What the class supports and the user does not have: fused first, being the fastest where it exists."""
        kinds: tuple[Implementation, ...] = ("fused", "foreach", "for_loop")
        others = set(facts.optimizer_implementations) - {facts.optimizer_implementation}
        return (cls(), *(cls(kind=kind) for kind in kinds if kind in others))

    def unavailable(self, facts: Facts) -> str | None:
        """The class decides."""
        if self.kind in ("default", *facts.optimizer_implementations):
            return None
        known = ", ".join(facts.optimizer_implementations) or "no choice of implementation"
        return f"{facts.optimizer} has {known}"

    def as_predicted(self, facts: Facts) -> Optimizer:
        """How it is implemented shows for a moment at the end of a step."""
        return Optimizer()

    def options_of(self, program: Program) -> Mapping[str, Any]:
        """A flag has a name for the fused AdamW."""
        return {"optim": "adamw_torch_fused"} if self.kind == "fused" and program == "TrainingArguments" else {}

    def on_optimizer(
        self, optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None
    ) -> torch.optim.Optimizer:
        """Set the class's own ``foreach`` and ``fused`` flags, before the first step.

        Raises:
            PlanError: the optimizer's class has no such implementation.

        Source: https://docs.pytorch.org/docs/stable/optim.html#algorithms
        """
        if self.kind == "default":
            return optimizer
        supported = supported_implementations(optimizer)
        if self.kind not in supported:
            raise PlanError(
                f"settings.optimizer.kind: {type(optimizer).__name__} supports {', '.join(supported) or 'no choice'}, "
                f"but got {self.kind}. Use kind: default."
            )
        flags = {key: value for key, value in _FLAGS[self.kind].items() if key in optimizer.defaults}
        optimizer.defaults.update(flags)
        for group in optimizer.param_groups:
            group.update(flags)
        if self.kind != "fused" and hasattr(optimizer, "_step_supports_amp_scaling"):
            # Built fused: a loss scaler would leave it to its kernel to unscale gradients, which the others cannot
            # (torch 2.13, amp/grad_scaler.py, step).
            optimizer._step_supports_amp_scaling = False
        return optimizer


def supported_implementations(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Of ``for_loop``, ``foreach``, ``fused``: what the optimizer's class takes for its parameters."""
    found = ["for_loop"] if {"foreach", "fused"} & optimizer.defaults.keys() else []
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # Adagrad's fused kernel exists for CPUs alone; the others' for each of these.
    devices = ("cpu",) if type(optimizer).__name__ == "Adagrad" else ("cpu", "cuda", "mps", "xpu")
    if "foreach" in optimizer.defaults:
        found.append("foreach")
    if "fused" in optimizer.defaults and all(p.is_floating_point() and p.device.type in devices for p in parameters):
        found.append("fused")
    return tuple(found)


def implementation_of(optimizer: torch.optim.Optimizer) -> str | None:
    """Of the same, what the optimizer takes as it was built; None where its groups differ, or it has no choice.

    Source: torch.optim.optimizer, _default_to_fused_or_foreach
    """
    found = {_implementation(group) for group in optimizer.param_groups}
    return found.pop() if len(found) == 1 and supported_implementations(optimizer) else None


def _implementation(group: dict[str, Any]) -> Implementation:
    if group.get("fused"):
        return "fused"
    is_foreach = group.get("foreach")
    if is_foreach is None and group.get("fused") is None and not group.get("differentiable"):
        is_foreach = all(p.device.type in ("cuda", "xpu") for p in group["params"])
    return "foreach" if is_foreach else "for_loop"
