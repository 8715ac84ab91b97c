"""``Fitted``: what ``autotune.fit`` chose, and what is predicted of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..estimates import Cheapest, Interval
from ..measure.profiling.allocations import OUTSIDE
from ..plan import Foreseen, Plan
from ..techniques import Facts, Settings
from ..units import ceil_mib, format_bytes, size
from ..words import settings_words

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .whole_batch import Loop

_SHOWN = 3
"""Most kinds of memory that are named."""


@dataclass(frozen=True)
class Fitted:
    """A model that was changed in place to fit a budget; after a dry run, one that was not."""

    plan: Plan
    """The settings, and the budget that they were chosen for: :func:`autotune.apply_to_model` takes it."""
    model: nn.Module
    """The model to train: the one that was given."""
    optimizer: torch.optim.Optimizer | None
    """The optimizer to step; None where none was given, or it is yet to be built."""
    found: Cheapest
    """What was predicted, and what was looked at."""
    facts: Facts
    """What is known of the model and the device."""
    applied: bool
    """False after a dry run."""
    notes: tuple[str, ...]
    """What a reader must know."""
    loop: Loop
    """What the loop does, as it was said."""

    @property
    def settings(self) -> Settings:
        """What was applied."""
        return self.plan.settings

    @property
    def peak(self) -> Interval:
        """What the device will charge the process, bytes: at most one peak in twenty lies above the interval."""
        return self.found.shown.process

    @property
    def stock_peak(self) -> Interval:
        """The same of the training as it stands."""
        return self.found.stock.process

    @property
    def binds(self) -> str:
        """Where the peak is, and what fills it."""
        return what_binds(self.found)

    @property
    def needs_context(self) -> bool:
        """Whether forward and loss have to run in :meth:`forward_context`, or by :meth:`loss`, for the peak to be the
        predicted one."""
        return any(one.has_context for one in self.settings.chosen())

    def forward_context(self) -> AbstractContextManager[Any]:
        """A context around the forward pass and the loss: autocast, and memory-saving layers in the loss."""
        return self.settings.in_force(self.loop.precision).forward_context(self.facts.device.type)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        """The loss of a batch, in that context.

        Args:
            model: the one that was given, or a wrapper of it such as DistributedDataParallel.
            batch: on the model's device.
        """
        with self.forward_context():
            return self.loop.loss(model, batch)

    def __str__(self) -> str:
        limit = self.plan.budget.limit
        assert limit is not None, "fit gives one"
        took = "chosen" if self.applied else "would be chosen"
        lines = [
            f"for {format_bytes(limit)}, {took}: {settings_words(self.settings, self.facts)}",
            f"predicted peak {size(self.peak.value)} ({size(self.peak.low)} to {size(self.peak.high)}); "
            f"as it stands {size(self.stock_peak.value)}",
            _step_words(self.found),
            f"binds: {self.binds}",
            *self.notes,
        ]
        return "\n".join(lines)


def _step_words(found: Cheapest) -> str:
    """How much longer a step takes, and how that is known."""
    if not found.law.is_measured:
        return f"counted work of a step: {found.times_step:.2f} times as it stands; no time is measured"
    speeds = found.law.said(found.shown.settings)
    return f"predicted time of a step: {found.times_step:.2f} times as it stands, at {speeds} measured here"


def foreseen(found: Cheapest) -> Foreseen:
    """What a plan says of a choice that is predicted."""
    peak = found.shown.process
    return Foreseen(
        process=ceil_mib(peak.value),
        low=ceil_mib(peak.low),
        high=ceil_mib(peak.high),
        reference=ceil_mib(found.stock.process.value),
        work=round(found.times_step, 3),
        speeds=found.law.said(found.shown.settings) if found.law.is_measured else None,
        how=found.how,
        binds=what_binds(found),
    )


def left_out(found: Cheapest, facts: Facts) -> Iterator[str]:
    """What could not be looked at, and why, in words."""
    for settings, reason in found.refused:
        yield f"not looked at: {settings_words(settings, facts)}, since {reason}"


def what_binds(found: Cheapest) -> str:
    """Where a peak is, and what fills it: ``backward of transformer.h.11: activation 1.2 GiB, optimizer 949 MiB``."""
    filled: dict[str, int] = {}
    for one in found.fills:
        filled[one.kind] = filled.get(one.kind, 0) + one.num_bytes
    most = sorted(filled.items(), key=lambda row: -row[1])[:_SHOWN]
    where = "" if found.module in ("", OUTSIDE) else f" of {found.module}"
    return f"{found.phase}{where}: {', '.join(f'{kind} {size(num_bytes)}' for kind, num_bytes in most)}"
