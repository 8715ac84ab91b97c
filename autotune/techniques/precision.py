"""Precision: in which type matrix products and convolutions compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..errors import PlanError
from .support.base import Effect, Exactness, FileKind, Program, Run, Stage, Technique
from .support.facts import Device, Facts, InTf32, ScriptFacts
from .support.lossy import NOT_ALLOWED, Affects
from .support.tf32 import Tf32, allow_tf32, in_tf32

if TYPE_CHECKING:
    import torch
    from torch import nn

    from . import Settings

Kind = Literal["fp32", "tf32", "bf16", "fp16"]

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""torch's names, which scripts parse."""
_FLOAT8 = (8, 9)
"""Compute capability from which on cards multiply in float8."""
_LIGHTNING = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}

_flags_before: list[Tf32] = []
"""torch's process-wide flags as the user had them, while a plan with TF32 is applied."""


class _GoesBy:
    """What a setting's kind goes by."""

    def __get__(self, setting: Precision | None, owner: type) -> str | None:
        return "float8 products" if getattr(setting, "kind", None) == "float8" else None


class Precision(Technique):
    """Parameters stay as the user made them (fp32); what changes is what autocast or TF32 computes in."""

    name: ClassVar[str] = "precision"
    goes_by: ClassVar[str | None] = _GoesBy()  # type: ignore[assignment]
    stage: ClassVar[Stage] = Stage.PRECISION
    affects: ClassVar[frozenset[Effect]] = Affects({"tensors", "code"}, {"float8"})  # type: ignore[assignment]
    purposes: ClassVar[Mapping[str, str]] = {
        "fp32": "Everything computes in the types that it has: no autocast. Convolutions on CUDA round their inputs to "
        "TF32 all the same, as torch has it by default.",
        "bf16": "Matrix products and convolutions compute in bfloat16; parameters stay fp32.",
        "fp16": "Matrix products and convolutions compute in float16, with a loss scaler.",
        "tf32": "Matrix products round their inputs to TF32, and so do convolutions, which do by torch's default.",
        "float8": "Large linear layers of blocks multiply in float8, with a scale for each tensor; all else is as with "
        "bf16.",
    }

    kind: Literal["default", "fp32", "tf32", "bf16", "fp16", "float8"] = "default"
    """``default`` is what the task states, or without that the model as it stands, fp32; ``bf16`` and ``fp16`` are
    autocast, fp16 with a loss scaler; ``float8`` is bf16 with linear layers whose inputs, weights and gradients are
    rounded to 8 bits."""

    @classmethod
    def facts_of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, device_type: str) -> Mapping[str, Any]:
        """What computes in TF32 already."""
        return {"tf32": tf32_of_job(device_type)}

    def describe(self, facts: Facts | None = None) -> str:
        """``fp32 (convolutions in TF32)``."""
        tf32 = facts.tf32 if facts is not None and self.kind == "fp32" else None
        return f"{self.kind} ({' and '.join(tf32)} in TF32)" if tf32 else self.kind

    @property
    def scales_loss(self) -> bool:
        """fp16's do."""
        return self.kind == "fp16"

    @property
    def autocast(self) -> Literal["bf16", "fp16"] | None:
        """The type of autocast; None without."""
        return "bf16" if self.kind == "float8" else self.kind if self.kind in ("bf16", "fp16") else None

    @classmethod
    def choices(cls, facts: Facts) -> tuple[Precision, ...]:
        """What the device computes natively, bf16 before fp16 (it needs no scaler), fp32 where the job has another."""
        others = (cls(kind="bf16"), cls(kind="tf32"), cls(kind="fp16"), cls(kind="fp32"), cls(kind="float8"))
        offered = [choice.or_default(facts) for choice in others if choice.unavailable(facts) is None]
        return tuple(dict.fromkeys([cls(), *offered]))

    @classmethod
    def extremes(cls, choices: Sequence[Technique]) -> tuple[Technique, ...]:
        """Those that change what a tensor takes, and fp16 where there is no bf16."""
        alike = {"tf32", "fp16"} if cls(kind="bf16") in choices else {"tf32"}
        return tuple(one for one in choices if not isinstance(one, Precision) or one.kind not in alike)

    def or_default(self, facts: Facts) -> Precision:
        """What the task states is the default, and fp32 where it states nothing."""
        return type(self)() if self.kind == (facts.precision or "fp32") else self

    def in_force(self, stated: Kind | None) -> Precision:
        """What this comes to in a task that states a precision; ``default`` where it states none."""
        return Precision(kind=stated) if self.kind == "default" and stated is not None else self

    def as_traced(self, stated: Kind | None) -> Precision:
        """What takes the same memory in a task that states a precision, and needs no device to be here: TF32 has the
        tensors of fp32."""
        return Precision(kind="fp32") if self.in_force(stated).kind == "tf32" else self

    def exactness(self, facts: Facts) -> Exactness:
        """All but the job's own round it differently; float8's 3 bits change gradients by a twentieth."""
        if self.kind == "float8":
            return "lossy"
        return "exact" if self.or_default(facts).kind == "default" else "rounding"

    def prior_gain(self) -> tuple[float, float]:
        """bf16 was 0.94 to 1.58 times as fast as fp32 at the medians of five trainings on a CPU
        (benchmarks/replay/tables). On an H200 a LLaMA of 0.9 billion took 1.72 times bf16's step in float8, 1.03 in
        compiled blocks (docs/evidence/advice.md); larger products may gain."""
        if self.kind == "float8":
            return (0.0, 0.4)
        return (0.0, 0.0) if self.kind in ("default", "fp32") else (0.2, 0.2)

    def unavailable(self, facts: Facts) -> str | None:
        """By compute capability on CUDA, by instruction set on a CPU. What the job has already, it can have."""
        if self.or_default(facts).kind == "default":
            return None
        if facts.own_autocast:
            return "the model has an autocast of its own, to which precision is left"
        return self.lacking(facts.device) or (_no_float8(facts) if self.kind == "float8" else None)

    def lacking(self, device: Device) -> str | None:
        """Why a device does not compute in this type natively; None where it does."""
        if self.kind == "bf16" and not device.bf16:
            return f"{device.name} has no bfloat16 arithmetic"
        if self.kind in ("tf32", "fp16") and device.type == "cpu":
            return f"{self.kind} is for CUDA devices"
        if self.kind == "tf32" and (device.capability or (0, 0)) < (8, 0):
            return f"{device.name} has no TF32 (compute capability 8.0 and up)"
        if self.kind == "tf32" and device.is_amd:
            return f"{device.name} is AMD's, where TF32 is another switch"
        if self.kind == "float8" and ((device.capability or (0, 0)) < _FLOAT8 or device.is_amd):
            return f"{device.name} has no float8 products (CUDA, compute capability 8.9 and up)"
        return None

    def conflicts(self, settings: Settings) -> str | None:
        """Who has linear layers or their weights in another form."""
        if self.kind != "float8":
            return None
        if settings.layers.kind != "none":
            return "memory-saving layers take the place of the linear ones that float8 wants: use one"
        if settings.frozen_weights.kind != "none" or settings.offload.kind == "parameters":
            return "float8 rounds weights that are in memory, and not codes or elsewhere: use bf16"
        if settings.parallel.kind in ("fsdp", "tensor"):
            return "float8 was not tried with weights in shards: use ddp"
        return None

    def beyond_inference(self) -> str | None:
        """Weights would be rounded at each call."""
        return "float8 was tried in training alone" if self.kind == "float8" else None

    def options_of(self, program: Program) -> Mapping[str, Any]:
        """Of all that compute in several types."""
        if self.kind == "default":
            return {}
        match program:
            case "Trainer":
                return {"bf16": self.autocast == "bf16", "fp16": self.autocast == "fp16"}
            case "Accelerator":
                return {"mixed_precision": self.autocast or "no"}
            case "Lightning":
                return {"precision": _LIGHTNING[self.autocast or self.kind]}
            case "timm" if self.autocast:
                return {"amp": True, "amp-dtype": _DTYPES[self.autocast]}
            case "nanoGPT" if (kind := self.autocast or self.kind) in _DTYPES:
                return {"dtype": _DTYPES[kind]}
        return {}

    @classmethod
    def left_to(cls, script: ScriptFacts) -> str | None:
        """One autocast is active."""
        own = "the script turns autocast on itself (Accelerate, a Trainer: mixed precision)"
        return own if script.autocasts else None

    def beyond_script(self) -> str | None:
        """No scaler is put into a loop."""
        if self.scales_loss:
            return "precision: fp16 needs a loss scaler, which is the script's. Use bf16, or autotune.apply."
        return None

    def not_in_file(self, kind: FileKind) -> str | None:
        """TF32 is a flag of a process."""
        return "it is a flag of the process" if self.kind == "tf32" else None

    def undo(self, model: nn.Module) -> nn.Module:
        """Torch's flags as the user had them, and its linear layers."""
        from .support.bits.float8_linear import restore

        if _flags_before:
            _flags_before.pop().restore()
        restore(model)
        return model

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """Allow TF32 in matrix products and convolutions, process-wide as torch has it; or have linear layers multiply
        in float8.

        Raises:
            PlanError: this device cannot compute in the type, or no layer can.
        """
        if self.kind == "bf16" and (name := _lstm_without_bf16(model)) is not None:
            raise PlanError(
                f"settings.precision.kind: bf16 cannot be used here: {name} is an LSTM on the CPU, and oneDNN has none "
                "in bfloat16 for this CPU's instruction set. Use fp32."
            )
        if self.kind == "float8":
            _to_float8(blocks)
        if self.kind != "tf32":
            return model
        import torch

        if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
            raise PlanError("settings.precision.kind: tf32 needs a CUDA device of compute capability 8.0. Use fp32.")
        _flags_before.append(allow_tf32(True))
        return model

    @property
    def has_context(self) -> bool:
        """Autocast is one."""
        return self.autocast is not None

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """Autocast around forward and loss.

        Source: https://docs.pytorch.org/docs/stable/amp.html
        """
        if not self.has_context:
            return nullcontext()
        import torch

        return torch.autocast(device_type, torch.bfloat16 if self.autocast == "bf16" else torch.float16)


def tf32_of_job(device_type: str) -> tuple[InTf32, ...] | None:
    """What of fp32 computes in TF32 by the job's own flags, whatever a plan that is applied has set; None on a device
    that has none."""
    import torch

    if device_type != "cuda" or not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        return None
    return in_tf32(_flags_before[0] if _flags_before else None)


def refused(stated: Kind | None, device: Device) -> str | None:
    """Why a job that states this precision cannot run on a device; None where it can."""
    if stated != "tf32" or (device.type == "cuda" and (device.capability or (8, 0)) >= (8, 0)):
        return None
    return (
        f'precision is "tf32", which needs a CUDA device of compute capability 8.0, but this is {device.name}. State '
        '"fp32" here.'
    )


def _no_float8(facts: Facts) -> str | None:
    """Why a job's linear layers do not multiply in float8 on any device; None where they do."""
    if not facts.allow_lossy:
        return NOT_ALLOWED
    if facts.inference:
        return "it was tried in training alone"
    if not facts.float8_numbers:
        return "no block of the model has a linear layer that is large enough, of multiples of 16 features"
    if facts.shared_by == "fsdp":
        return "it was not tried with weights in shards"
    return None


def has_float8() -> bool:
    """Whether this process can multiply in float8 on a card, or plans for one."""
    import torch

    from ..internals.fake_tensors import is_planned_for_card

    is_nvidia = torch.version.hip is None and torch.cuda.is_available()
    return is_planned_for_card() or (is_nvidia and torch.cuda.get_device_capability() >= _FLOAT8)


def _to_float8(blocks: Sequence[nn.Module]) -> None:
    from .support.bits.float8_linear import to_float8

    if not has_float8():
        raise PlanError("settings.precision.kind: float8 needs a CUDA device of compute capability 8.9. Use bf16.")
    if not to_float8(blocks):
        raise PlanError(
            "settings.precision.kind: float8: no block of the model has a linear layer of more than 1,024 outputs or "
            "4,096 inputs, both multiples of 16. Use bf16."
        )


def _lstm_without_bf16(model: nn.Module) -> str | None:
    """The first LSTM that this CPU could not run in bfloat16; None where there is none."""
    import torch
    from torch import nn

    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    for name, module in model.named_modules():
        is_onednns = isinstance(module, nn.LSTM) and not module.proj_size
        if is_onednns and all(one.device.type == "cpu" for one in module.parameters()):
            return name or type(module).__name__
    return None
