"""Lightning's mixed precision, as a plan was measured with it."""

from __future__ import annotations

from typing import Any, cast

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from ..errors import PlanError
from ..plan import Plan
from .lightning_hooks import PRECISIONS


class PlanPrecision(MixedPrecision):
    """Autocast that keeps its casts of the weights within a step, and gradients that may be clipped before an optimizer
    steps that was built fused.

    In Lightning 2.6 neither is so: each use of a weight casts it again, and clipping raises
    (https://github.com/Lightning-AI/pytorch-lightning/issues/21611, and 21435).
    """

    def __init__(self, plan: Plan, device: str | None = None) -> None:
        """
        Args:
            plan: its precision is bf16 or fp16.
            device: torch's device type; None is the plan's, or what there is.

        Raises:
            PlanError: it is another.
        """
        self._technique = plan.settings.precision
        name: Any = PRECISIONS.get(self._technique.kind)
        if name not in ("bf16-mixed", "16-mixed"):
            raise PlanError(
                f"settings.precision.kind: PlanPrecision is for bf16 and fp16, but got {self._technique.kind}. Use "
                "trainer_arguments(plan)."
            )
        device = device or plan.budget.device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(name, device)

    def autocast_context_manager(self) -> torch.autocast:
        """As in a trial."""
        return cast(torch.autocast, self._technique.forward_context(self.device))

    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Clip gradients, a fused optimizer's too: those are not unscaled yet."""
        if self.scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            self.scaler.unscale_(optimizer)
        Precision.clip_gradients(self, optimizer, *args, **kwargs)
