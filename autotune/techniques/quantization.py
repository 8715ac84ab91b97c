"""Quantization: linear layers multiply integers, in inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..errors import PlanError
from .support.base import Effect, Exactness, Run, Stage, Technique
from .support.facts import Facts

if TYPE_CHECKING:
    import torch
    from torch import nn

    from . import Settings


class Quantization(Technique):
    """In which type linear layers multiply, in inference: weights are rounded once, inputs at each call.

    Source: https://docs.pytorch.org/docs/stable/quantization.html, dynamic quantization
    """

    name: ClassVar[str] = "quantization"
    goes_by: ClassVar[str | None] = "integer products"
    stage: ClassVar[Stage] = Stage.FROZEN
    affects: ClassVar[frozenset[Effect]] = frozenset({"tensors", "code"})
    not_in_scripts: ClassVar[str] = "it is for inference"
    purposes: ClassVar[Mapping[str, str]] = {
        "int8": "Linear layers multiply 8-bit integers: weights take a quarter of their memory in fp32.",
    }

    kind: Literal["none", "int8"] = "none"
    """``none`` is stock; ``int8`` has a scale for each output feature of a weight, and for each row of an input."""

    def describe(self, facts: Facts | None = None) -> str:
        """``linear layers in int8``."""
        return "linear layers as they are" if self.kind == "none" else "linear layers in int8"

    @classmethod
    def facts_of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, device_type: str) -> Mapping[str, Any]:
        """How large such layers are."""
        from .support.bits.int8_linear import linear_layers

        return {"linear_numbers": sum(linear.weight.numel() for _, _, linear in linear_layers(model))}

    @classmethod
    def choices(cls, facts: Facts) -> tuple[Quantization, ...]:
        """Both where the job is inference and has such layers."""
        int8 = cls(kind="int8")
        return (cls(), int8) if int8.unavailable(facts) is None else (cls(),)

    def exactness(self, facts: Facts) -> Exactness:
        """Of layers of 768 features with random weights, outputs differ by 1.6 %."""
        return "exact" if self.kind == "none" else "lossy"

    def prior_gain(self) -> tuple[float, float]:
        """A quarter, and not much is known."""
        return (0.0, 0.0) if self.kind == "none" else (0.25, 0.3)

    def unavailable(self, facts: Facts) -> str | None:
        """It has no gradients, and was tried on a CPU alone."""
        if self.kind == "none":
            return None
        if not facts.inference:
            return "it is for inference (--inference)"
        if facts.device.type != "cpu":
            return "it was not tried on a card"
        return None if facts.linear_numbers else "the model has no linear layer that is worth it"

    def beyond_script(self) -> str | None:
        """No script's training."""
        return None if self.kind == "none" else "quantization is for inference: apply the plan by autotune.apply."

    def conflicts(self, settings: Settings) -> str | None:
        """Who has weights in another form."""
        if self.kind != "none" and settings.frozen_weights.kind != "none":
            return "frozen_weights keeps the same weights in another form: use one"
        return None

    def undo(self, model: nn.Module) -> nn.Module:
        """For ``int8``, stock layers of the weights as they were rounded, which round to the same codes.

        Raises:
            PlanError: an earlier plan rounded them, and this one wants them as they were.
        """
        from .support.bits.int8_linear import Int8Linear, restore

        if self.kind == "none" and any(isinstance(module, Int8Linear) for module in model.modules()):
            raise PlanError(
                "settings.quantization: an earlier plan rounded this model's weights to int8, and what they were is "
                "lost. Build the model anew."
            )

        restore(model)
        return model

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """Linear layers become others, of the same names.

        Raises:
            PlanError: there are none, or the model trains.
        """
        if self.kind == "none":
            return model
        from .support.bits.int8_linear import quantize

        if model.training:
            raise PlanError(
                "settings.quantization.kind: int8 has no gradients, and the model is in training mode. It is for a "
                "plan that `autotune search --inference` wrote; use kind: none."
            )
        if not quantize(model):
            raise PlanError(
                "settings.quantization.kind: the model has no linear layer of at least 32 features. Use kind: none."
            )
        return model
