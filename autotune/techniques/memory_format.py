"""Memory format: channels_last stores images as NHWC, which convolutions on tensor cores and AVX-512 read faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..errors import PlanError
from .support.base import Effect, FileKind, Program, Run, Stage, Technique
from .support.facts import Facts

if TYPE_CHECKING:
    import torch
    from torch import nn

_AVX2_CHANNELS = 8
"""Input channels that oneDNN's AVX2 kernels take at once."""

_MARK = "_autotune_channels_last"
"""Where a model has the names of the weights that were put in another order."""


class MemoryFormat(Technique):
    """The order of a convolution's weights in memory; activations follow them from the first convolution on.

    Dropout behind a convolution takes other values then: torch draws its mask in the order of memory.
    """

    name: ClassVar[str] = "memory_format"
    stage: ClassVar[Stage] = Stage.DEVICE
    affects: ClassVar[frozenset[Effect]] = frozenset({"layout"})
    purposes: ClassVar[Mapping[str, str]] = {
        "channels_last": "Stores images channels last (NHWC), which convolutions read faster.",
    }

    kind: Literal["contiguous", "channels_last"] = "contiguous"
    """``contiguous`` leaves the model as it is; ``channels_last`` stores 4-D and 5-D weights with channels last."""

    @classmethod
    def facts_of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, device_type: str) -> Mapping[str, Any]:
        """What a kernel does wrong."""
        return {"channels_last_fault": channels_last_fault(model)}

    @classmethod
    def choices(cls, facts: Facts) -> tuple[MemoryFormat, ...]:
        """Both where the model has 2-D or 3-D convolutions."""
        last = cls(kind="channels_last")
        return (cls(), last) if last.unavailable(facts) is None else (cls(),)

    def prior_gain(self) -> tuple[float, float]:
        """channels_last was 0.78 and 1.19 times as fast at the medians of two trainings (benchmarks/replay/tables)."""
        return (0.0, 0.0) if self.kind == "contiguous" else (0.0, 0.2)

    def unavailable(self, facts: Facts) -> str | None:
        """channels_last is defined for 4-D and 5-D tensors alone."""
        if self.kind == "channels_last" and not {2, 3} & set(facts.conv_dims):
            return "the model has no 2-D or 3-D convolutions"
        return facts.channels_last_fault if self.kind == "channels_last" else None

    def options_of(self, program: Program) -> Mapping[str, Any]:
        """timm's."""
        return {"channels-last": True} if self.kind == "channels_last" and program == "timm" else {}

    def undo(self, model: nn.Module) -> nn.Module:
        """Weights in torch's own order again, but those that the user had in another."""
        for name in vars(model).pop(_MARK, ()):
            parameter = model.get_parameter(name)
            parameter.data = parameter.data.contiguous()
        return model

    def not_in_file(self, kind: FileKind) -> str | None:
        """Strides of weights are kept by torch alone."""
        return "ONNX has one order of dimensions" if kind == "onnx" else None

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """Change the weights' strides in place, 4-D as channels_last and 5-D as channels_last_3d.

        Raises:
            PlanError: oneDNN would write past a buffer (:func:`channels_last_fault`).

        Source: https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
        """
        if self.kind == "contiguous":
            return model
        import torch

        if (fault := channels_last_fault(model)) is not None:
            raise PlanError(f"settings.memory_format.kind: channels_last cannot be used here: {fault}.")
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        changed = []
        for name, parameter in model.named_parameters():
            if parameter.ndim in formats and not parameter.is_contiguous(memory_format=formats[parameter.ndim]):
                parameter.data = parameter.data.to(memory_format=formats[parameter.ndim])
                changed.append(name)
        vars(model)[_MARK] = tuple(changed)
        return model


def channels_last_fault(model: nn.Module) -> str | None:
    """Why a CPU would train a model wrongly, or crash, in channels_last; None where nothing is known against it.

    For the gradient of a strided 1 × 1 convolution's weight, oneDNN's AVX2 kernel writes past a buffer where the input
    has fewer channels than it takes at once. Seen in torch 2.13.0 on one thread, as a crash; on several, others saw
    wrong gradients. Source: https://github.com/uxlfoundation/oneDNN/issues/6035
    """
    import torch
    from torch import nn

    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return None
    for name, module in model.named_modules():
        if not isinstance(module, nn.Conv2d | nn.Conv3d) or module.weight.device.type != "cpu":
            continue
        num_channels, is_strided = module.in_channels // module.groups, max(module.stride) > 1
        if is_strided and set(module.kernel_size) == {1} and num_channels < _AVX2_CHANNELS:
            return (
                f"{name or type(module).__name__} is a strided 1 × 1 convolution of {num_channels} channels, for which "
                "oneDNN writes past a buffer on a CPU with AVX2 (oneDNN issue 6035)"
            )
    return None
