"""Precision: in which type matrix products and convolutions compute."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..errors import PlanError
from ._base import Exactness, Run, Technique
from .facts import Facts

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Precision"]

_flags_before: list[tuple[str, bool]] = []
"""torch's process-wide flags as the user had them, while a plan with TF32 is in force."""


class Precision(Technique):
    """Parameters stay as the user made them (fp32); what changes is what autocast or TF32 computes in."""

    name: ClassVar[str] = "precision"

    kind: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """``fp32`` is the model as it stands; ``bf16`` and ``fp16`` are autocast, fp16 with a loss scaler."""

    @property
    def scales_loss(self) -> bool:
        """Whether the loss scaler is on: fp16 gradients underflow without it."""
        return self.kind == "fp16"

    @classmethod
    def choices(cls, facts: Facts) -> tuple[Precision, ...]:
        """What the device computes natively, bf16 before fp16 (it needs no scaler)."""
        offered = (cls(kind="bf16"), cls(kind="tf32"), cls(kind="fp16"))
        return (cls(), *(choice for choice in offered if choice.unavailable(facts) is None))

    def exactness(self, facts: Facts) -> Exactness:
        """All but fp32 round."""
        return "exact" if self.kind == "fp32" else "rounding"

    def prior_gain(self) -> tuple[float, float]:
        """bf16 was 0.94 to 1.58 times as fast at the medians of five trainings on a CPU (benchmarks/replay/tables)."""
        return (0.0, 0.0) if self.kind == "fp32" else (0.2, 0.2)

    def unavailable(self, facts: Facts) -> str | None:
        """By compute capability on CUDA, by instruction set on a CPU."""
        device = facts.device
        if self.kind == "bf16" and not device.bf16:
            return f"{device.name} has no bfloat16 arithmetic"
        if self.kind in ("tf32", "fp16") and device.type == "cpu":
            return f"{self.kind} is for CUDA devices"
        if self.kind == "tf32" and (device.capability or (0, 0)) < (8, 0):
            return f"{device.name} has no TF32 (compute capability 8.0 and up)"
        return None

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> None:
        """Allow TF32 in matrix products and convolutions, process-wide as torch has it.

        By torch's older names: once the newer ``fp32_precision`` is set, reading an older one raises.

        Raises:
            PlanError: this device cannot compute in TF32.
        """
        import torch

        _restore_flags()
        if self.kind != "tf32":
            return
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
            raise PlanError("settings.precision.kind: tf32 needs a CUDA device of compute capability 8.0. Use fp32.")
        _flags_before.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """Autocast around forward and loss.

        Source: https://docs.pytorch.org/docs/stable/amp.html
        """
        if self.kind in ("fp32", "tf32"):
            return nullcontext()
        import torch

        return torch.autocast(device_type, torch.bfloat16 if self.kind == "bf16" else torch.float16)


def _restore_flags() -> None:
    """Take off what an earlier plan in this process put on."""
    import torch

    if _flags_before:
        precision, cudnn = _flags_before.pop()
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = cudnn
