"""Quantization: linear layers multiply integers, or weights are kept as codes, in inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..errors import PlanError
from ..units import MIB, format_bytes
from .support.base import Effect, Exactness, Run, Stage, Technique
from .support.facts import Facts

if TYPE_CHECKING:
    import torch
    from torch import nn

    from . import Settings

_CODES = {"int8_weights": "8bit", "int4_weights": "4bit"}
"""By kind, the codes of ``frozen_weights``."""
_LEAST_BYTES = 8 * MIB
"""Weights that take less are not worth it."""
_LOST = "an earlier plan rounded this model's weights to int{bits}, and what they were is lost. Build the model anew."


class _TradesTime:
    """Whether a setting's kind is of codes, which are read at each use; the others save time too."""

    def __get__(self, setting: Quantization | None, owner: type) -> bool:
        return getattr(setting, "kind", None) in _CODES


class Quantization(Technique):
    """In which type linear layers multiply, in inference: weights are rounded once, inputs at each call.

    Source: https://docs.pytorch.org/docs/stable/quantization.html, dynamic quantization
    """

    name: ClassVar[str] = "quantization"
    goes_by: ClassVar[str | None] = "integer products"
    stage: ClassVar[Stage] = Stage.FROZEN
    affects: ClassVar[frozenset[Effect]] = frozenset({"tensors", "code"})
    trades_time: ClassVar[bool] = _TradesTime()  # type: ignore[assignment]
    not_in_scripts: ClassVar[str] = "it is for inference"
    purposes: ClassVar[Mapping[str, str]] = {
        "int8": "Linear layers multiply 8-bit integers: weights take a quarter of their memory in fp32.",
        "int8_weights": "Keeps weights as 8-bit codes in blocks of 256, read at each use: a quarter of their memory in "
        "fp32.",
        "int4_weights": "Keeps weights as 4-bit codes in blocks of 128, read at each use: an eighth of their memory in "
        "fp32.",
    }

    kind: Literal["none", "int8", "int8_weights", "int4_weights"] = "none"
    """``none`` is stock; ``int8`` has a scale for each output feature of a weight, and for each row of an input. Of
    ``int8_weights`` and ``int4_weights``, products are in the job's own type, by the codes of ``frozen_weights``;
    embeddings have them too."""

    def describe(self, facts: Facts | None = None) -> str:
        """``linear layers in int8``."""
        if self.kind in _CODES:
            return f"weights in {self.kind.removesuffix('_weights')}"
        return "linear layers as they are" if self.kind == "none" else "linear layers in int8"

    @classmethod
    def facts_of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, device_type: str) -> Mapping[str, Any]:
        """How large such layers are, and what could be codes."""
        from .support.bits.freezing import frozen_weights
        from .support.bits.int8_linear import linear_layers

        return {
            "linear_numbers": sum(linear.weight.numel() for _, _, linear in linear_layers(model)),
            "codable_bytes": sum(weight.nbytes for weight in frozen_weights(model, in_inference=True)),
        }

    @classmethod
    def choices(cls, facts: Facts) -> tuple[Quantization, ...]:
        """Those that inference has such weights for. 4 bits change outputs by far more than a tolerance allows: they
        are for who has a quality judged."""
        lossy = (cls(kind="int4_weights"),) if facts.allow_lossy else ()
        every = (cls(), cls(kind="int8"), cls(kind="int8_weights"), *lossy)
        return tuple(one for one in every if one.unavailable(facts) is None)

    def exactness(self, facts: Facts) -> Exactness:
        """Of layers of 768 features with random weights, outputs of ``int8`` differ by 1.6 %. Of a trained LLaMA, 8-bit
        codes changed them as much as bf16 did (``benchmarks.frozen_weights``)."""
        known: Mapping[str, Exactness] = {"none": "exact", "int8_weights": "rounding"}
        return known.get(self.kind, "lossy")

    def prior_gain(self) -> tuple[float, float]:
        """A quarter, and not much is known; codes take time to read."""
        known = {"none": (0.0, 0.0), "int8": (0.25, 0.3)}
        return known.get(self.kind, (-0.2, 0.2))

    def unavailable(self, facts: Facts) -> str | None:
        """It has no gradients, and was tried on a CPU alone."""
        if self.kind == "none":
            return None
        if not facts.inference:
            return "it is for inference (--inference)"
        if facts.device.type != "cpu":
            return "it was not tried on a card"
        if self.kind in _CODES and facts.codable_bytes < _LEAST_BYTES:
            return f"linear layers and embeddings have {format_bytes(facts.codable_bytes)}, which is not worth it"
        is_able = self.kind in _CODES or facts.linear_numbers
        return None if is_able else "the model has no linear layer that is worth it"

    def beyond_script(self) -> str | None:
        """No script's training."""
        return None if self.kind == "none" else "quantization is for inference: apply the plan by autotune.apply."

    def conflicts(self, settings: Settings) -> str | None:
        """Who has weights in another form, or reads them by itself."""
        if self.kind != "none" and settings.frozen_weights.kind != "none":
            return "frozen_weights keeps the same weights in another form: use one"
        if self.kind in _CODES and settings.compile.kind != "none":
            return "a compiled program reads weights by itself, and would keep them in full: use one"
        return None

    def check_model(self, model: nn.Module, device: torch.device | None) -> None:
        """It has no gradients, was tried on a CPU alone, and what was rounded stays so.

        Raises:
            PlanError: the model trains, or goes elsewhere, or an earlier plan rounded weights that this one wants as
                they were.
        """
        from .support.bits.freezing import rounded_in_inference
        from .support.bits.int8_linear import Int8Linear

        if self.kind != "none" and device is not None and device.type != "cpu":
            raise PlanError(
                f"settings.quantization.kind: {self.kind} is for a CPU, and the model goes to {device}. Use kind: none."
            )
        if self.kind != "none" and model.training:
            raise PlanError(
                f"settings.quantization.kind: {self.kind} has no gradients, and the model is in training mode. It is "
                "for a plan that `autotune search --inference` wrote; use kind: none."
            )
        if self.kind != "int8" and any(isinstance(module, Int8Linear) for module in model.modules()):
            raise PlanError(f"settings.quantization: {_LOST.format(bits=8)}")
        for kind in rounded_in_inference(model) - {_CODES.get(self.kind)}:
            raise PlanError(f"settings.quantization: {_LOST.format(bits=kind[0])}")

    def undo(self, model: nn.Module) -> nn.Module:
        """For the same kind, stock layers of the weights as they were rounded, which round to the same codes."""
        from .support.bits.freezing import thaw
        from .support.bits.int8_linear import restore

        restore(model)
        thaw(model)
        return model

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """Linear layers become others, of the same names; or weights become codes, as those of ``frozen_weights``.

        Raises:
            PlanError: there are none.
        """
        if self.kind == "none":
            return model
        from .support.bits.freezing import freeze
        from .support.bits.int8_linear import quantize

        if self.kind in _CODES and not freeze(model, _CODES[self.kind], in_inference=True):
            raise PlanError(
                "settings.quantization.kind: the model has no linear layer or embedding with weights of its own in "
                "fp32, bf16 or fp16. Use kind: none."
            )
        if self.kind == "int8" and not quantize(model):
            raise PlanError(
                "settings.quantization.kind: the model has no linear layer of at least 32 features. Use kind: none."
            )
        return model
