"""Errors that a measurement finds in a training, or in what it runs on."""

from __future__ import annotations

from ..errors import AutotuneError


class NonFiniteLoss(AutotuneError):
    """The loss was NaN or infinite."""

    def __init__(self, step: int, value: float) -> None:
        """
        Args:
            step: the optimizer step, counted from 1 over the whole measurement.
            value: the loss.
        """
        super().__init__(f"the loss is not finite at optimizer step {step}: it is {value}.")
        self.step = step
        self.value = value


class DeviceLost(AutotuneError):
    """The device has failed, or torch cannot use it, or others hold it: it says nothing of any configuration."""
