"""Memory format: channels_last stores images as NHWC, which convolutions on tensor cores and AVX-512 read faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from ._base import Effect, Run, Stage, Technique
from .facts import Facts

if TYPE_CHECKING:
    from torch import nn

__all__ = ["MemoryFormat"]


class MemoryFormat(Technique):
    """The order of a convolution's weights in memory; activations follow them from the first convolution on."""

    name: ClassVar[str] = "memory_format"
    stage: ClassVar[Stage] = Stage.DEVICE
    affects: ClassVar[frozenset[Effect]] = frozenset({"layout"})
    purposes: ClassVar[Mapping[str, str]] = {
        "channels_last": "Stores images channels last (NHWC), which convolutions read faster.",
    }

    kind: Literal["contiguous", "channels_last"] = "contiguous"
    """``contiguous`` leaves the model as it is; ``channels_last`` stores 4-D and 5-D weights with channels last."""

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
        return None

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """Change the weights' strides in place, 4-D as channels_last and 5-D as channels_last_3d.

        Source: https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
        """
        if self.kind == "contiguous":
            return model
        import torch

        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        for parameter in model.parameters():
            if parameter.ndim in formats:
                parameter.data = parameter.data.to(memory_format=formats[parameter.ndim])
        return model
