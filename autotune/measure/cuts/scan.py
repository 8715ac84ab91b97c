"""``Scan``: what each group of channels costs in time and memory, and how much the loss hangs on it untrained."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from ...errors import Caught, PlanError
from ...plan import Plan
from ...pruning import Group, How, Record, cut_each, groups, rebuild
from ...randomness import seed_everything, undisturbed
from ...task import Task
from ...techniques.models.pruning import Pruning
from ...training.apply_pieces import on_two_samples
from ...training.apply_plan import apply, build_model
from ...training.gradients import divisor
from ...training.training import Training
from ..profiling.allocations import OUTSIDE, Phase
from ..profiling.profile import profile
from ..profiling.types import ModuleRow, Profile, ProfileOptions
from ..timing.disturbance import one_thread
from .choose import Layer
from .types import GroupRow

RATIOS = (0.25, 0.5, 0.75)
"""At which each group is cut alone."""
NEVER = 1e9
"""What the loss rises by where a cut cannot be had, or what is left computes nothing finite."""
_NUM_EXAMPLES = 128
"""At least, that the loss is taken over."""
_MOST_BATCHES = 32
_NUM_TIMED = 3
_KEPT = 16
"""Bytes that a parameter takes with its gradient and two states of an optimizer, in fp32."""


class Scan:
    """One model's groups."""

    def __init__(self, task: Task, plan: Plan, seed: int, by_bytes: bool) -> None:
        """
        Args:
            task: whose model is scanned.
            plan: the job as it stands.
            seed: of the model, and of everything random.
            by_bytes: layers are told by what they hold at a step's peak, and not by its time.

        Raises:
            PlanError: the model cannot be cut at all.
        """
        self._task, self._plan, self._seed, self._by_bytes = task, plan, seed, by_bytes
        self._run = on_two_samples(task.build_dataset(), task.collate or default_collate, task.compute_loss)
        seed_everything(seed)
        self._model = build_model(task)
        self.groups: tuple[Group, ...] = groups(self._model, self._run)

    def recorded(self, prunings: Sequence[Pruning]) -> list[Pruning | PlanError]:
        """Each with the record of its cut, or why it cannot be had."""
        found = cut_each(self._model, self._run, [one.how for one in prunings])
        pairs = zip(prunings, found, strict=True)
        return [one if isinstance(one, PlanError) else pruning.recorded(one) for pruning, one in pairs]

    def _profiled(self) -> Profile:
        with one_thread():  # as the cuts are timed
            return profile(self._training(), self._task, ProfileOptions(num_timed_steps=_NUM_TIMED))

    def _training(self) -> Training:
        return apply(self._plan, self._task, seed=self._seed, enforce=True)

    def rows(self, known: Sequence[GroupRow], keep: Callable[[GroupRow], None]) -> tuple[list[GroupRow], list[Layer]]:
        """What each group costs and how much the loss rises without parts of it; and the step's layers.

        Args:
            known: rows that were found before.
            keep: is told each that is found now.
        """
        found = {row.first: row for row in known}
        left = [group for group in self.groups if group.first not in found]
        profiled = self._profiled()
        layers = layers_of(profiled, self.groups)
        if left:
            training = self._training()
            batches = [*_some(training)]
            whole = _loss(training, self._task, None, batches)
            hows = [How(0.0, ratios={group.first: ratio}) for group in left for ratio in RATIOS]
            cuts = iter(cut_each(self._model, self._run, hows))
            for group in left:
                losses = [_loss(training, self._task, one, batches) for one in itertools.islice(cuts, len(RATIOS))]
                found[group.first] = GroupRow(
                    first=group.first,
                    width=group.width,
                    rises=tuple(
                        itertools.accumulate((min(abs(loss - whole), NEVER) for loss in losses), max, initial=0.0)
                    )[1:],
                    seconds=sum(one.cost for one in layers if group.first in one.groups),
                    num_bytes=_bytes_of(profiled, group),
                )
                keep(found[group.first])
        rows = [found[group.first] for group in self.groups]
        return rows, layers_of(profiled, self.groups, by_bytes=True) if self._by_bytes else layers


def layers_of(found: Profile, every: Sequence[Group], by_bytes: bool = False) -> list[Layer]:
    """A step's time, or memory, by the modules that take it, and the groups by whose widths it goes.

    What has no parameters, such as an activation, goes by the groups that the layers before and after it share. An
    optimizer's time is shared out by parameters. Memory is what is saved for backward, and parameters with what comes
    with them.
    """
    rows = [row for row in found.modules if row.name != OUTSIDE]
    own = _own(rows, (lambda row: row.kept_bytes) if by_bytes else _seconds)
    parameters = _own(rows, lambda row: row.num_parameters)
    of_optimizer = found.phases_s.get(Phase.OPTIMIZER, 0.0) / max(sum(parameters.values()), 1)
    by_parameter = _KEPT if by_bytes else of_optimizer
    named = {row.name: tuple(one.first for one in every if row.name in one.layers) for row in rows}
    leaves = [row.name for row in rows if not any(other.name.startswith(f"{row.name}.") for other in rows if row.name)]
    for at, name in enumerate(leaves):
        if not named[name] and not parameters[name]:
            before = next((named[one] for one in reversed(leaves[:at]) if named[one]), ())
            after = next((named[one] for one in leaves[at + 1 :] if parameters[one]), ())
            named[name] = tuple(one for one in before if one in after)
    layers = [Layer(own[name] + by_parameter * parameters[name], one) for name, one in named.items()]
    whole = found.peak.num_bytes if by_bytes else found.timed_step_s or 0.0
    return [*layers, Layer(max(whole - sum(one.cost for one in layers), 0.0))]


def _seconds(row: ModuleRow) -> float:
    return (row.forward_s or 0.0) + (row.backward_s or 0.0)


def _own(rows: Sequence[ModuleRow], of: Callable[[ModuleRow], float]) -> dict[str, float]:
    """Of each module, without what is in it."""
    found = {row.name: of(row) for row in rows}
    for row in rows:
        if row.name:
            above = row.name.rpartition(".")[0]
            while above not in found:
                above = above.rpartition(".")[0]
            found[above] -= of(row)
    return {name: max(value, 0) for name, value in found.items()}


def _bytes_of(found: Profile, group: Group) -> int:
    rows = [row for row in found.modules if row.name in group.layers]
    return sum(row.kept_bytes + _KEPT * row.num_parameters for row in rows)


def _some(training: Training) -> Iterator[Any]:
    """The first micro-batches."""
    num_samples = 0
    for batch in itertools.islice(training.loader, _MOST_BATCHES):
        yield batch
        num_samples += training.batch.micro
        if num_samples >= _NUM_EXAMPLES:
            return


@torch.no_grad()
def _loss(training: Training, task: Task, record: Record | PlanError | None, batches: Sequence[Any]) -> float:
    """Mean loss of a copy of the model that is cut so; infinite where it cannot be.

    It is in the mode in which it trains, so that BatchNorm goes by what it sees, but for dropout.
    """
    if isinstance(record, PlanError):
        return math.inf
    model = copy.deepcopy(training.model)
    if record is not None:
        rebuild(model, record)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    total = 0.0
    with undisturbed(), Caught() as raised:
        seed_everything(0)
        for batch in batches:
            with training.settings.forward_context(training.device.type):
                said = task.compute_loss(model, batch)
            total += float(said[0] / divisor(said[1])) if isinstance(said, tuple) else float(said)
    is_known = raised.error is None and math.isfinite(total)
    return total / len(batches) if is_known else math.inf
