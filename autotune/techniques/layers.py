"""Memory-saving layers: what backward does not read is not kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ._base import Technique
from .facts import Facts

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Layers"]


class Layers(Technique):
    """Keep for backward only what it reads: bits of a ReLU, nothing of a frozen layer, no output that is had again.

    Source: Bhatia and Dangel 2024, arXiv:2404.12406.
    """

    name: ClassVar[str] = "layers"
    trades_time: ClassVar[bool] = True

    kind: Literal["none", "exact"] = "none"
    """``none`` keeps what stock torch keeps; ``exact`` has the same values and gradients from less memory."""

    @classmethod
    def choices(cls, facts: Facts) -> tuple[Layers, ...]:
        """Both, for any model."""
        return cls(), cls(kind="exact")

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Convert the model in place, or take off what an earlier plan put on."""
        from ..layers import convert, restore

        if self.kind == "exact":
            convert(model)
        else:
            restore(model)

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """Answer what the loss itself calls, such as a cross-entropy."""
        if self.kind == "none":
            return nullcontext()
        from ..layers import answered

        return answered()
