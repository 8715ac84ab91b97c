"""``predict``: peak and work of many configurations before any is measured, from one memory model for each
combination."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ..errors import PlanError
from ..measure.device import available_host_bytes
from ..task import Task
from ..techniques import TECHNIQUES, Effect, Settings, Technique
from ..techniques.checkpointing import Checkpointing
from .allocators.process import resident_bytes
from .checkpointing.block_choice import Places
from .checkpointing.process_choice import ProcessChoice
from .forks import in_forks
from .memory_model_cache import MemoryModelCache
from .predictor import Predictor
from .tracing.fake_step import Untraceable
from .types import EstimateOptions, Prediction, PredictOptions

_Asked = tuple[Settings, bool]
"""A configuration, and whether something is to be chosen for it."""

_WITHOUT_LAW: tuple[Effect, ...] = ("samples", "update", "process", "loader")
"""Effects that do not need a memory model of their own. Samples are the model's variable; the optimizer's
implementation matters only for a moment at the end of a step; an allocator changes what it adds; loader workers come on
top."""

_COPIES = 2
"""Most copies of the model that a process holds at a time: one is built, one is what settings are applied to."""

_MOST_KEPT = 4
"""Predictors kept for a combination and each setting that is chosen from, since each holds its traces, and the task's
model where it was probed: of no blocks, of all, and of the last choices."""


@dataclass(frozen=True)
class Predicted:
    """The result."""

    predictions: tuple[Prediction | None, ...]
    """One for each configuration asked for, those to choose something for last; None where the time was used up, or a
    batch cannot run, or the combination cannot be had."""
    probed: str | None
    """Why some were probed by real steps instead of traced; None where none was."""
    refused: tuple[tuple[Settings, str], ...]
    """Combinations that cannot be put on the model, and why."""


class _Answer(NamedTuple):
    """Of one combination; the same as in :class:`Predicted`."""

    predictions: dict[_Asked, Prediction]
    probed: str | None
    refused: tuple[tuple[Settings, str], ...] = ()


def predict(task: Task, options: PredictOptions) -> Predicted:
    """Predict each configuration's peak, and count its work.

    Args:
        task: what the configurations are applied to.
        options: the configurations, and the device that they are for.

    Raises:
        Exception: whatever the user's code raises.
    """
    ends_s = time.monotonic() + (options.most_s or float("inf"))
    if options.target == "cpu":  # a dataset that lies in memory is the process's too
        dataset = task.build_dataset()
        task = replace(task, build_dataset=lambda: dataset)
    bases = _Bases(options, task)
    places = Places.of(task) if options.to_choose else None

    memory_models = MemoryModelCache(task, options.largest_of, options.target)
    memory_models.open()

    def answers(row: tuple[Settings, list[_Asked]]) -> _Answer:
        """The predictions for one combination."""
        predictions: dict[_Asked, Prediction] = {}
        try:
            made = row[0].on_task(task)
            own = places if made is task or places is None else Places.of(made)
            predictors = _Predictors(row[1], task, options, bases, own, memory_models)
            predictions.update(predictors.predictions(ends_s))
        except PlanError as error:  # which says nothing of other combinations
            return _Answer(predictions, None, ((row[0], str(error)),))
        return _Answer(predictions, predictors.reason)

    room = available_host_bytes() // (_COPIES * max(options.model_bytes, 1))
    found: dict[_Asked, Prediction] = {}
    probed: str | None = None
    asked = [*((one, False) for one in options.settings), *((one, True) for one in options.to_choose)]
    refused: list[tuple[Settings, str]] = []
    groups = _by_combination(asked, _techniques(options.choices))
    for answer in in_forks(answers, list(groups.items()), room, ends_s):
        found |= answer.predictions
        probed = probed or answer.probed
        refused += answer.refused
    return Predicted(tuple(map(found.get, asked)), probed, tuple(refused))


def _techniques(choices: Iterable[Settings]) -> tuple[Technique, ...]:
    """What is chosen from."""
    return tuple(itertools.chain.from_iterable(asked.chosen() for asked in choices))


def _by_combination(every: Iterable[_Asked], choices: tuple[Technique, ...]) -> dict[Settings, list[_Asked]]:
    """Configurations grouped by everything but batch, checkpointing and what is chosen for them, the fewest changes
    first."""
    found: dict[Settings, list[_Asked]] = {}
    for settings, is_open in every:
        chosen = choices if is_open else ()
        stock = settings.stock(*_WITHOUT_LAW).having(Checkpointing(), *(type(one)() for one in chosen))
        found.setdefault(stock, []).append((settings, is_open))
    return dict(sorted(found.items(), key=lambda row: len(row[0].model_dump(exclude_defaults=True))))


def _order(asked: _Asked) -> tuple[object, ...]:
    """Sort by checkpointing, what is to be chosen last: that starts from the models of none and of all blocks."""
    settings, is_open = asked
    named = settings.checkpointing
    return is_open, named.kind != "none", named.every, named.blocks, _micro(settings)


class _Bases:
    """Memory of a process without tensors, for each combination; computed before anything large is built.

    What a technique loads stays loaded, so each combination adds to those before it.
    """

    def __init__(self, options: PredictOptions, task: Task) -> None:
        self._added: dict[str, int] = {}
        if options.target == "cuda":
            self._stock = options.context.value
            return
        settings, asked = Settings(), (*options.settings, *options.to_choose, *options.choices)
        self._stock = known = resident_bytes(settings.in_force(task.precision))
        for name in (name for name, technique in TECHNIQUES.items() if "code" in technique.affects):
            changed = next((one for each in asked if (one := getattr(each, name)) != getattr(settings, name)), None)
            if changed is not None:
                settings = settings.having(changed)
                now = resident_bytes(settings.in_force(task.precision))
                self._added[name], known = now - known, now

    def of(self, settings: Settings) -> int:
        """Bytes for a configuration."""
        stock = Settings()
        added = (size for name, size in self._added.items() if getattr(settings, name) != getattr(stock, name))
        return self._stock + sum(added)


class _Predictors:
    """Predictors of one combination of techniques, by checkpointing and what is chosen."""

    def __init__(
        self,
        asked: list[_Asked],
        task: Task,
        options: PredictOptions,
        bases: _Bases,
        places: Places | None,
        memory_models: MemoryModelCache,
    ) -> None:
        members = [settings for settings, _ in asked]
        split = next((one.batch for one in members if one.batch is not None and one.batch.accumulate > 1), None)
        self._options = EstimateOptions(
            target=options.target,
            capability=options.capability,
            context=options.context,
            reference_batch=split.num_samples if split else 1,
            is_held=split is not None,
            largest_of=options.largest_of,
        )
        self._asked, self._task, self._choices = asked, task, _techniques(options.choices)
        self._bases, self._places, self._memory_models = bases, places, memory_models
        self._limit_bytes = options.limit_bytes
        self._micros = set(map(_micro, members))
        self._named = {settings.checkpointing for settings, is_open in asked if not is_open}
        self.of = lru_cache(_MOST_KEPT * len(self._choices))(self._predictor)
        """The predictor of settings that need a memory model of their own."""
        self.reason: str | None = None
        """Why one was probed by real steps; None where none was."""

    def predictions(self, ends_s: float) -> Iterator[tuple[_Asked, Prediction]]:
        """A prediction for each; after the deadline no new checkpointing is begun."""
        begun: set[Checkpointing] = set()
        for settings, is_open in sorted(self._asked, key=_order):
            if time.monotonic() > ends_s and (is_open or settings.checkpointing not in begun):
                continue
            begun.add(settings.checkpointing)
            with suppress(Untraceable):  # this batch alone: a BatchNorm wants more than one value
                yield (settings, is_open), self._prediction(settings, is_open)

    def _prediction(self, settings: Settings, is_open: bool) -> Prediction:
        """The prediction of one configuration.

        Raises:
            Untraceable: this batch had to be traced, and could not be.
        """
        chosen = None
        if is_open:
            assert self._places is not None, "they are found where something is to be chosen"
            chosen = self._choose(settings, self._places)
            settings = settings.having(*(self._everywhere(self._places) if chosen is None else chosen))
        predictor = self.of(settings.stock(*_WITHOUT_LAW))
        self.reason = self.reason or predictor.memory_model(_micro(settings)).reason
        return _prediction(predictor, settings).model_copy(
            update={"chosen": None if chosen is None else Settings().having(*chosen)}
        )

    def _choose(self, settings: Settings, places: Places) -> tuple[Technique, ...] | None:
        """Settings such that the upper end of the process's interval is within the limit. Each choice everywhere where
        even that is not enough; None where it cannot be told."""
        if self._limit_bytes is None:
            return None
        choice = ProcessChoice(places, lambda one: self.of(one.stock(*_WITHOUT_LAW)), self._choices)
        try:
            found = choice.choose(settings, _micro(settings), self._limit_bytes, lambda process, _: process.high)
        except Untraceable:
            return None
        names = {one.name for one in self._choices}
        return self._everywhere(places) if found is None else tuple(getattr(found, name) for name in names)

    def _everywhere(self, places: Places) -> tuple[Technique, ...]:
        """Each choice, in all blocks."""
        every = range(places.num_blocks)
        return tuple(one.in_blocks(every, len(every)) if one.adds_up == "blocks" else one for one in self._choices)

    def _predictor(self, settings: Settings) -> Predictor:
        checkpointing = settings.checkpointing
        is_named = not checkpointing.blocks or checkpointing in self._named
        micros = self._micros if is_named else ()  # blocks that are chosen for one micro-batch seldom are for another
        options = self._options.model_copy(update={"settings": settings})
        return Predictor(self._task, options, self._bases.of(settings), self._memory_models, micros)


def _prediction(predictor: Predictor, settings: Settings) -> Prediction:
    micro = _micro(settings)
    passes, num_samples = (settings.batch.accumulate, settings.batch.num_samples) if settings.batch else (1, 1)
    memory_model = predictor.memory_model(micro).memory_model
    step, optimizer = memory_model.work(micro)
    seen = micro * min(passes, 2)  # samples of the step that was traced
    process, trace = predictor.process(micro, settings), memory_model.at(micro)
    live = trace.live_bytes()
    return Prediction(
        peak_bytes=process.value,
        high_bytes=process.high,
        step_bytes=max(live) - live[0],
        tensor_bytes=max(live),
        host_bytes=memory_model.host_bytes(micro),
        beside_bytes=trace.peak_beside("parameter", "gradient", "optimizer_state"),
        flops_per_sample=step.flops / seen + optimizer.flops / num_samples,
        bytes_per_sample=step.num_bytes / seen + optimizer.num_bytes / num_samples,
    )


def _micro(settings: Settings) -> int:
    return settings.batch.micro if settings.batch is not None else 1
