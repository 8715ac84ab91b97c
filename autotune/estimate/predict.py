"""``predict``: what is known of many configurations before any is measured, by a law for each combination."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..plan import Budget, Plan
from ..task import Task
from ..techniques import Settings
from .baseline import resident_bytes
from .estimated import EstimateOptions, Prediction, PredictOptions
from .predictor import Predictor
from .rehearsal import Untraceable
from .segments import base_bytes

__all__ = ["Predicted", "predict"]

_WITHOUT_LAW = ("batch", "optimizer", "allocator", "data_loading")
"""Techniques that one law serves, whatever they are: the batch is the law's variable, the optimizer's implementation
matters for a moment at the end of a step, an allocator in what it adds, and loader workers come on top."""

_BRINGS_CODE = ("precision", "layers", "checkpointing")
"""Techniques whose kernels and modules take memory of their own."""


@dataclass(frozen=True)
class Predicted:
    """What there is to say."""

    predictions: tuple[Prediction | None, ...]
    """Of each configuration that was asked for; None where the time was used up, or a batch cannot run."""
    probed: str | None
    """Why some were probed by real steps instead of traced."""


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
    bases = _Bases(options)
    found: dict[Settings, Prediction | None] = {}
    probed: str | None = None
    for combination, members in _by_combination(options.settings).items():
        if time.monotonic() > ends_s:
            break
        predictor = _predictor(combination, members, task, options, bases)
        for settings in members:
            try:
                found[settings] = _prediction(predictor, settings)
            except Untraceable:  # this batch alone: a BatchNorm wants more than one value
                continue
            probed = probed or predictor.law(_micro(settings)).reason
    return Predicted(tuple(found.get(settings) for settings in options.settings), probed)


def _by_combination(every: Iterable[Settings]) -> dict[Settings, list[Settings]]:
    """Configurations by what a law is made for, the fewest changes first."""
    found: dict[Settings, list[Settings]] = {}
    stock = {name: Settings.model_fields[name].get_default(call_default_factory=True) for name in _WITHOUT_LAW}
    for settings in every:
        found.setdefault(settings.model_copy(update=stock), []).append(settings)
    return dict(sorted(found.items(), key=lambda row: len(row[0].model_dump(exclude_defaults=True))))


class _Bases:
    """What a process is charged without tensors; asked before anything large is built.

    What a technique brings along stays once it is there, so each is asked for what it adds to those before it.
    """

    def __init__(self, options: PredictOptions) -> None:
        self._added: dict[str, int] = {}
        if options.target == "cuda":
            self._stock = base_bytes()
            return
        settings = Settings()
        self._stock = known = resident_bytes(settings)
        for name in _BRINGS_CODE:
            changed = next(
                (one for each in options.settings if (one := getattr(each, name)) != getattr(settings, name)), None
            )
            if changed is not None:
                settings = settings.model_copy(update={name: changed})
                now = resident_bytes(settings)
                self._added[name], known = now - known, now

    def of(self, settings: Settings) -> int:
        """Of a configuration."""
        stock = Settings()
        added = (size for name, size in self._added.items() if getattr(settings, name) != getattr(stock, name))
        return self._stock + sum(added)


def _predictor(
    combination: Settings, members: list[Settings], task: Task, options: PredictOptions, bases: _Bases
) -> Predictor:
    split = next((one.batch for one in members if one.batch is not None and one.batch.accumulate > 1), None)
    asked = EstimateOptions(
        target=options.target,
        reference_batch=split.num_samples if split else 1,
        is_held=split is not None,
        largest_of=options.largest_of,
    )
    plan = Plan(settings=combination, budget=Budget(device="cpu"))
    return Predictor(plan, task, asked, bases.of(combination))


def _prediction(predictor: Predictor, settings: Settings) -> Prediction:
    micro = _micro(settings)
    passes, num_samples = (settings.batch.accumulate, settings.batch.num_samples) if settings.batch else (1, 1)
    law = predictor.law(micro).law
    step, optimizer = law.work(micro)
    seen = micro * min(passes, 2)  # samples of the step that was traced
    return Prediction(
        peak_bytes=predictor.process(micro, settings).value,
        flops_per_sample=step.flops / seen + optimizer.flops / num_samples,
        bytes_per_sample=step.num_bytes / seen + optimizer.num_bytes / num_samples,
    )


def _micro(settings: Settings) -> int:
    return settings.batch.micro if settings.batch is not None else 1
