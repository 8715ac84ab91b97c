"""The optimizers that a script builds: which of them step the model, and how often each was seen to."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..refusal import PREPARE

FEW_STEPS = 10
"""Steps of other optimizers after which it is plain which of them train."""


class Optimizers:
    """Those that are alive, in the order in which they were built."""

    def __init__(self) -> None:
        self._built: list[weakref.ref[torch.optim.Optimizer]] = []
        self._num_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()

    def __bool__(self) -> bool:
        return bool(self._built)

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """One was built."""
        self._built.append(weakref.ref(optimizer))

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """One has stepped, or is about to."""
        self._num_steps[optimizer] = self._num_steps.get(optimizer, 0) + 1

    @property
    def num_steps(self) -> int:
        """Of all of them."""
        return sum(self._num_steps.values())

    def of(self, parameters: set[int]) -> list[torch.optim.Optimizer]:
        """Those that have one of these parameters (by id)."""
        return [one for ref in self._built if (one := ref()) is not None and parameters & parameters_of(one)]

    def of_one_model(self, mine: Sequence[torch.optim.Optimizer]) -> str:
        """Why several of the same model are refused."""
        return (
            f"{len(mine)} optimizers have parameters of the same model, and a plan is for one: {self._told(mine)}. "
            f"Name the one that steps: {PREPARE}."
        )

    def why_not(self, mine: torch.optim.Optimizer, other: torch.optim.Optimizer, is_named: bool) -> str | None:
        """What there is to say of a step that another than the plan's optimizer makes; None where it is one of
        several of which the script names one, as it should."""
        if not is_named:
            return (
                f"the script steps several optimizers ({self._told([mine, other])}), and a plan is for one model and "
                f"its optimizer. Name them: {PREPARE}."
            )
        shares = not parameters_of(mine).isdisjoint(parameters_of(other))
        if shares and not self._num_steps.get(mine) and self._num_steps.get(other) == FEW_STEPS:
            return (
                f"the optimizer that autotune.prepare names makes no step: {self._told([other, mine])}, and both have "
                f"the same parameters. Name the one that steps: {PREPARE}."
            )
        return None

    def _told(self, which: Sequence[torch.optim.Optimizer]) -> str:
        """``SGD (the base_optimizer of SAM) of 58 parameters stepped 10 times, SAM of 58 parameters never stepped``."""
        return ", ".join(map(self._of_one, which))

    def _of_one(self, optimizer: torch.optim.Optimizer) -> str:
        count = self._num_steps.get(optimizer, 0)
        holders = [
            f" (the {name} of {type(one).__name__})"
            for ref in self._built
            if (one := ref()) is not None
            for name, value in vars(one).items()
            if value is optimizer
        ]
        times = {0: "never stepped", 1: "stepped once"}.get(count, f"stepped {count} times")
        num_parameters = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        return f"{type(optimizer).__name__}{''.join(holders[:1])} of {num_parameters:,} parameters {times}"


def parameters_of(optimizer: Any) -> set[int]:
    """The parameters that it steps, by id: those that take gradients."""
    return {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
