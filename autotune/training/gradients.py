"""``Gradients``: how the micro-batches of one optimizer step add up to the gradient of its whole effective batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..data.loader import Loader
from ..data.positions import Position
from ..errors import TaskError
from ..ranks import summed
from .halving import Halving
from .uneven import check_alike

Count = float | Tensor
"""What a mean loss is over: samples, or the count that came with the loss, on its device."""


class Gradients:
    """Of the current optimizer step, in the parameters' ``grad``.

    A micro-batch's loss is divided by what the step's total is expected to be, before the later ones are known; once
    all are there, gradients are corrected by the actual total. Ranks' gradients are averaged, so each rank's share is
    multiplied by their number.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, loader: Loader, halving: Halving, are_alike: bool = False
    ) -> None:
        """
        Args:
            optimizer: of the parameters.
            loader: of the micro-batches.
            halving: how many forward passes one micro-batch of the loader takes.
            are_alike: whether all ranks are to have the same losses, which the first is looked at for.
        """
        self.num_added = 0
        """Micro-batches that are in the gradients, or are about to be."""
        self.position: Position | None = None
        """Of the last of them."""
        self._optimizer, self._loader, self._ranks, self._halving = optimizer, loader, loader.ranks, halving
        self._weight: Count = 0.0
        self._expected: Count = 0.0
        self._is_to_check = are_alike

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The optimizer's, in its own order."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    @property
    def num_passes(self) -> int:
        """Forward passes in an optimizer step; the most that there may be where they are cut by length."""
        batch = self._loader.batch
        return (batch.accumulate if batch.tokens is None else batch.num_samples) * self._halving.parts

    @property
    def is_whole(self) -> bool:
        """Whether the last micro-batch of the optimizer step is added: counted, since a loop may leave some out."""
        ends = self.position is not None and self.position.ends_step
        return ends or self.num_added >= self.num_passes

    def clear(self) -> None:
        """Another optimizer step begins."""
        self._optimizer.zero_grad(set_to_none=True)
        self._weight = self._expected = 0.0
        self.num_added, self.position = 0, None

    def share(self, loss: Tensor, count: Any, position: Position, in_step: bool) -> tuple[Tensor, Count]:
        """What to call ``backward`` on for a micro-batch, and what its mean is over.

        Args:
            loss: its mean loss, or with a ``count`` its sum.
            count: None, or what the loss is a sum over.
            position: of the micro-batch.
            in_step: whether ranks make this pass at the same time, so that they can exchange numbers within it.

        Raises:
            TaskError: ranks that see the same samples have other losses.
        """
        if self._is_to_check:
            check_alike(loss)
            self._is_to_check = False
        counts = count is not None
        weight: Count = _scalar(count) if counts else float(position.num_samples)
        if not self.num_added:
            self._expected = self._expected_of(position, weight, counts, in_step)
        self.position = position
        self.num_added += 1
        self._weight = self._weight + weight
        share = loss / self._expected if counts else loss * (weight / self._expected)
        if self._ranks.size > 1:
            share = share * self._ranks.size
        return share.reshape(()), weight

    def _expected_of(self, position: Position, weight: Count, counts: bool, in_step: bool) -> Count:
        """What a step's losses are divided by before its actual total is known: the same in every rank."""
        num_samples = self._loader.batch.num_samples
        if self._ranks.size > 1 and not counts:
            whole = self._ranks.num_samples or num_samples * self._ranks.size
            return float(position.step_samples or whole)
        # A step of one micro-batch, a short tail too, is divided by its own total, as a stock loop does.
        whole = position.num_samples if position.ends_step else num_samples
        times = whole / position.num_samples
        if self._ranks.size > 1 and in_step:
            return divisor(summed(weight * times, self._loader.device))
        return divisor(weight) * times

    def copy(self) -> None:
        """Hold what is added so far in memory of its own: later micro-batches are added to that in place."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def settle(self, counts: bool, in_step: bool) -> None:
        """All are added: a short tail, or counts that varied, make the actual total another than was expected.

        Args:
            counts: whether the losses came with counts.
            in_step: as in :meth:`share`.
        """
        if self.num_added <= 1 and not self._ranks.shares and in_step:
            return  # divided by its own total; other ranks had one too
        if self._ranks.size > 1:
            if not counts:  # the total was known
                return
            self._weight = summed(self._weight, self._loader.device)
        if not isinstance(self._weight, Tensor) and self._weight == self._expected:
            return
        factor = self._expected / divisor(self._weight)
        for gradient in (p.grad for p in self.parameters if p.grad is not None):
            gradient.mul_(factor.to(gradient.device) if isinstance(factor, Tensor) else factor)

    def clip(self, model: nn.Module, max_norm: float) -> None:
        """To a norm over all parameters, in the model's order: its bits depend on that."""
        known = dict.fromkeys(self.parameters)
        ordered = list(dict.fromkeys(p for p in model.parameters() if p in known) | known)
        parts = [p for p in ordered if hasattr(p, "full_tensor")]
        if len(parts) in (0, len(ordered)):
            nn.utils.clip_grad_norm_(ordered, max_norm)
            return
        known = dict.fromkeys(parts)
        both = [parts, [p for p in ordered if p not in known]]  # which torch does not take together
        norms = [nn.utils.get_total_norm([p.grad for p in some if p.grad is not None]) for some in both]
        total = torch.stack([getattr(norm, "full_tensor", lambda norm=norm: norm)() for norm in norms]).norm()
        for some in both:
            nn.utils.clip_grads_with_norm_(some, max_norm, total)

    def state_dict(self) -> dict[str, Any] | None:
        """Of an optimizer step that is begun; None between two."""
        if not self.num_added or self.position is None:
            return None
        num_samples, _, epoch, place, *_ = self.position
        return {
            "gradients": [parameter.grad for parameter in self.parameters],
            "weight": self._weight,
            "expected": self._expected,
            "micro_batches": self.num_added,
            "position": (num_samples, epoch, place),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in the middle of an optimizer step."""
        for parameter, gradient in zip(self.parameters, state["gradients"], strict=True):
            parameter.grad = None if gradient is None else gradient.detach().clone().to(parameter.device)
        self._weight, self._expected = (
            one.to(self._loader.device) if isinstance(one, Tensor) else one
            for one in (state["weight"], state["expected"])
        )
        self.num_added = state["micro_batches"]
        num_samples, epoch, place = state["position"]
        self.position = Position(num_samples, ends_step=False, epoch=epoch, place=place)


def read_loss(loss: Any) -> tuple[Tensor, Any]:
    """A mean loss and None, or (loss_sum, count).

    Raises:
        TaskError: it is neither.
    """
    value, count = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value, count
    got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise TaskError(f"compute_loss must return a scalar tensor, or (loss_sum, count), but got {got}.")


def divisor(count: Count) -> Count:
    """The count, or 1 where there is none: micro-batches without a valid token add nothing, instead of 0 / 0."""
    if isinstance(count, Tensor):
        return torch.where(count == 0, 1, count)
    return count or 1.0


def _scalar(count: Any) -> Count:
    """A count as it came: a tensor stays on its device, so that no step waits for it."""
    return count.detach().reshape(()) if isinstance(count, Tensor) else float(count)
