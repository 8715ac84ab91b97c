"""``TechniqueInUse``: what a job does with a technique beside plain training. Of each kind of setting, one model."""

from __future__ import annotations

import io
import math
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import default_collate

from ..errors import PlanError
from ..measure.timing.disturbance import one_thread
from ..plan import Plan
from ..randomness import seed_everything
from ..task import Task
from ..techniques import Exactness, Facts, Settings, Technique
from ..techniques.batch import Batch
from ..techniques.precision import Precision
from ..training.apply_pieces import apply_to_optimizer
from ..training.apply_plan import apply
from ..training.training import Training
from .facts import facts_of
from .runs import (
    Run,
    equal_gradients,
    gradients_of,
    loss_and_backward,
    relative_difference,
    run_applied,
    state_of,
    without_dropout,
)
from .zoo import BATCH_SIZE, ZOO

_LARGEST_DIFFERENCE: dict[Exactness, dict[str, float]] = {
    "exact": {"losses": 2e-5, "gradients": 2e-5, "trained states": 2e-5},
    "rounding": {"losses": 0.01, "gradients": 0.25, "trained states": 0.01},
}
"""Relative L2 difference from the stock loop: fp32 reordering, and bfloat16's 8 bits of mantissa, which flip the signs
at a ReLU behind a BatchNorm of few samples (16 % of the ResNet-like's first gradient)."""
_SCALED = Precision(kind="fp16")
_INFINITE = (1.0, math.inf, 1.0)
"""Factors of the losses of three steps."""
_WHOLE, _HALVES = Batch(micro=BATCH_SIZE), Batch(micro=BATCH_SIZE // 2, accumulate=2)


class TechniqueInUse:
    """The part of :class:`autotune.testing.techniques.TechniqueContract` that takes each kind of setting once, on the
    first task that may have it."""

    technique: ClassVar[type[Technique]]
    """The class under test; it must have its line in :class:`autotune.techniques.Settings`."""
    tasks: ClassVar[Mapping[str, Task]] = ZOO
    """By name; those of the zoo, where the technique does not take others."""
    refuses: ClassVar[Mapping[str, str]] = {}
    """Uses that it refuses, with the words of the error (a regular expression): ``applied again``, ``accumulation``,
    ``clipping``, ``loss scaler``."""
    beside: ClassVar[tuple[Technique, ...]] = ()
    """Settings of others, without which its own are refused."""
    keeps_gradients: ClassVar[bool] = True
    """Whether gradients are there once backward has ended; losses and trained states are compared in any case."""
    rounds_within: ClassVar[float] = _LARGEST_DIFFERENCE["rounding"]["trained states"]
    """Largest difference of the trained state with a setting that rounds."""

    @pytest.fixture(autouse=True)
    def _on_one_thread(self) -> Iterator[None]:
        """Environments are not applied here, and saying so is another test's."""
        with one_thread(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*was measured with.*")
            yield

    def default(self) -> Technique:
        """The setting that does nothing."""
        return self.technique()

    def test_a_training_goes_on_as_it_was_saved(self) -> None:
        """In the middle of a step where it accumulates, else of an epoch; read by ``torch.load`` as weights only, into
        a fresh training of what was applied: its further losses, weights and buffers are those of the one that was
        saved, bit for bit."""
        for choice, task in self._kinds():
            batch = _WHOLE if "accumulation" in self.refuses else _HALVES
            first = apply(Plan(settings=Settings(batch=batch).having(*self.beside, choice)), task)
            batches = iter(first.loader)
            first.step(next(batches))
            state = _saved(first.state_dict())
            wanted = [first.step(batch).loss for batch in batches]
            second = apply(Plan(settings=first.settings), task)
            second.load_state_dict(state)
            found = [second.step(batch).loss for batch in second.loader]
            assert len(found) == len(wanted) > 0, choice
            assert all(map(torch.equal, found, wanted)), choice
            assert Run(state=state_of(second.model)).equals(Run(state=state_of(first.model))), choice

    def test_a_pickle_is_a_model_of_its_own(self) -> None:
        """It gives the same loss and gradients, and none of them reach the original."""
        for choice, task in self._kinds():
            training = apply(Plan(settings=self.settings(choice)), task)
            batch = next(iter(training.loader))
            copied = pickle.loads(pickle.dumps(training.model))
            losses = [loss_and_backward(task, each, batch) for each in (copied, training.model)]
            assert torch.equal(*losses), choice
            pairs = zip(copied.parameters(), training.model.parameters(), strict=True)
            assert all(a is not b and (equal_gradients(a, b) or not self.keeps_gradients) for a, b in pairs), choice

    def test_it_is_applied_again_and_taken_off(self) -> None:
        """To its own model and optimizer, it trains as it does applied once. A plan without it, to the same model with
        the weights that it began with, trains as the stock loop does."""
        for choice, task in self._kinds():
            plan, stock = Plan(settings=self.settings(choice)), Plan(settings=Settings(batch=_WHOLE))
            wanted, own = (_epoch(apply(each, task)) for each in (plan, stock))
            start = state_of(apply(stock, task).model)
            training = apply(plan, task)
            same = replace(task, build_model=partial(getattr, training, "model"))
            if "applied again" in self.refuses:
                for each in (plan, stock):
                    self._is_refused("applied again", each.settings, same)
                continue
            again = apply(plan, same)
            apply_to_optimizer(plan, again.optimizer)
            assert _epoch(again).equals(wanted), choice
            without = apply(stock, replace(task, build_model=partial(getattr, again, "model")))
            without.model.load_state_dict(start)
            assert _epoch(without).equals(own), choice

    def test_it_accumulates_and_clips(self) -> None:
        """Two micro-batches a step, whose gradients are clipped once, agree with the stock loop's."""
        for choice, kind in self._kinds():
            plain, clipped = without_dropout(kind), replace(without_dropout(kind), max_grad_norm=0.1)
            halves = Settings(batch=_HALVES).having(*self.beside, choice)
            for use, settings, task in (
                ("accumulation", halves, plain),
                ("clipping", self.settings(choice), clipped),
            ):
                if use in self.refuses:
                    self._is_refused(use, settings, task)
            settings = self.settings(choice) if "accumulation" in self.refuses else halves
            stock = Settings(batch=_WHOLE) if choice.name == "batch" else settings.having(self.default())
            task = plain if "clipping" in self.refuses else clipped
            self.check(choice, facts_of(kind), run_applied(task, settings), run_applied(task, stock))

    def test_an_average_in_a_loop_of_its_own_follows(self) -> None:
        """An exponential average of the weights agrees with the stock loop's, and computes with weights of its own."""
        for choice, kind in self._kinds():
            task = without_dropout(kind)
            found, wanted = (
                _averaged(apply(Plan(settings=each), task), task)
                for each in (self.settings(choice), Settings(batch=_WHOLE))
            )
            self.check(choice, facts_of(kind), found, wanted)

    def test_a_loss_scaler_skips_a_step(self) -> None:
        """One of infinite gradients, in fp16, leaves each parameter as it is; those before and after it do not."""
        for choice, kind in self._kinds():
            task, settings = (
                without_dropout(kind),
                Settings(batch=_WHOLE, precision=_SCALED).having(*self.beside, choice),
            )
            if settings.precision != _SCALED:
                continue
            if "loss scaler" in self.refuses:
                self._is_refused("loss scaler", settings, task)
                continue
            loss = _Loss(task)
            training = apply(Plan(settings=settings), replace(task, compute_loss=loss))
            stepped: dict[int, bool] = {}
            for number, batch in enumerate(training.loader):
                step = number // training.loader.batch.accumulate
                before, loss.factor = [p.detach().clone() for p in training.model.parameters()], _INFINITE[step]
                stepped[step] = bool(training.step(batch).stepped)
                assert step != 1 or all(map(torch.equal, before, training.model.parameters())), choice
            assert stepped == {0: True, 1: False, 2: True}, choice
            assert all(p.isfinite().all() for p in training.model.parameters()), choice

    def test_ddp_has_its_gradients(self) -> None:
        """In torch's own wrapper, in a group of one process, they are those of the model without it."""
        for choice, task in self._kinds() if self.keeps_gradients else ():
            trainings = [apply(Plan(settings=self.settings(choice)), task) for _ in range(2)]
            batch = next(iter(trainings[0].loader))
            loss_and_backward(task, trainings[0].model, batch)
            with _group_of_one():
                loss_and_backward(task, nn.parallel.DistributedDataParallel(trainings[1].model), batch)
            alone, wrapped = (gradients_of(training.model) for training in trainings)
            assert relative_difference(wrapped, alone) <= _LARGEST_DIFFERENCE["exact"]["gradients"], choice

    def check(self, choice: Technique, facts: Facts, found: Run, wanted: Run) -> None:
        """Losses, gradients and state agree within the choice's exactness; those of a lossy one are finite."""
        exactness = choice.exactness(facts)
        if exactness == "lossy":
            assert all(loss.isfinite() for loss in found.losses), choice
            return
        largest = _LARGEST_DIFFERENCE[exactness]
        if exactness == "rounding":
            largest = {**largest, "trained states": self.rounds_within}
        for name, difference in self._differences(found, wanted):
            assert difference <= largest[name], f"{choice!r}: {name} differ by {difference}"

    def settings(self, choice: Technique) -> Settings:
        """With the batch of the zoo."""
        return Settings(batch=_WHOLE).having(*(self.beside if choice != self.default() else ()), choice)

    def _choices(self, task: Task) -> tuple[Technique, ...]:
        return self.technique.choices(facts_of(task))

    def _others(self, task: Task) -> tuple[Technique, ...]:
        """The choices beside the default, with which nothing is applied."""
        return tuple(choice for choice in self._choices(task) if choice != self.default())

    def _kinds(self) -> Iterator[tuple[Technique, Task]]:
        """The first choice of each kind, with the first task that may have it."""
        found: dict[Any, tuple[Technique, Task]] = {}
        for task in self.tasks.values():
            for choice in self._others(task):
                found.setdefault(getattr(choice, "kind", choice.name), (choice, task))
        yield from found.values()

    def _is_refused(self, use: str, settings: Settings, task: Task) -> None:
        with pytest.raises((PlanError, ValidationError), match=self.refuses[use]):
            apply(Plan(settings=settings), task)

    def _differences(self, one: Run, other: Run) -> Iterator[tuple[str, float]]:
        assert len(one.losses) == len(other.losses)
        losses = ({str(step): loss for step, loss in enumerate(run.losses)} for run in (one, other))
        yield "losses", relative_difference(*losses)
        if self.keeps_gradients:
            yield "gradients", relative_difference(one.gradients, other.gradients)
        yield "trained states", relative_difference(one.state, other.state)


def _saved(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _epoch(training: Training) -> Run:
    """One epoch, from the same random numbers."""
    seed_everything(0)
    return Run([training.step(batch).loss for batch in training.loader], state=state_of(training.model))


def _averaged(training: Training, task: Task) -> Run:
    """The average of the weights over an epoch, and what it loses on all samples after each step."""
    samples = (task.collate or default_collate)([*task.build_dataset()])
    average = AveragedModel(training.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))  # type: ignore[no-untyped-call]
    losses = []
    for batch in training.loader:
        with training.forward_context():
            loss = task.compute_loss(training.model, batch)
        training.backward(loss, batch)
        if not training.optimizer_step():
            continue
        average.update_parameters(training.model)
        with torch.no_grad(), training.forward_context():
            own = task.compute_loss(average.module, samples)
        losses.append(own[0] / own[1] if isinstance(own, tuple) else own)
    return Run(losses, state=state_of(average.module))


class _Loss:
    """A task's loss, times a factor."""

    factor = 1.0

    def __init__(self, task: Task) -> None:
        self._task = task

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        loss = self._task.compute_loss(model, batch)
        return (loss[0] * self.factor, loss[1]) if isinstance(loss, tuple) else loss * self.factor


@contextmanager
def _group_of_one() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
