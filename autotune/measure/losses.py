"""Losses of a training, which are read late, so that nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Losses:
    """Of steps, in order, each on its device until it is read."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, torch.Tensor, float | torch.Tensor]] = []

    def add(self, step: int, loss: torch.Tensor, count: float | torch.Tensor = 1.0) -> None:
        """
        Args:
            step: that it is of.
            loss: a scalar, detached.
            count: what it is the mean over; a loss over nothing is left out.
        """
        self._rows.append((step, loss.float().reshape(()), count))

    def look(self) -> Callable[[], list[tuple[int, float]]]:
        """Those since the last look: what is returned gives steps and losses, once the device has come here."""
        rows, self._rows = self._rows, []
        if not rows:
            return list
        losses = _to_host(torch.stack([loss for _, loss, _ in rows]))
        counted = [count for _, _, count in rows if isinstance(count, torch.Tensor)]
        counts = _to_host(torch.stack(counted)) if counted else None

        def read() -> list[tuple[int, float]]:
            of_tensors = iter(counts.tolist() if counts is not None else ())
            weights = [next(of_tensors) if isinstance(count, torch.Tensor) else count for _, _, count in rows]
            values = zip(rows, losses.tolist(), weights, strict=True)
            return [(step, value) for (step, _, _), value, weight in values if weight]

        return read


def _to_host(values: torch.Tensor) -> torch.Tensor:
    """Its copy in page-locked memory, which holds what it should once the device has come here
    (torch 2.13, aten/src/ATen/native/TensorConversions.cpp, ``_to_copy``: ``pin_out``)."""
    return values.to("cpu", non_blocking=True)
