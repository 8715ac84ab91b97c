"""What a competitor may know: the configurations, what is predicted of them, the budget. And what a trial told it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from autotune.estimates import Prediction
from autotune.plan import Budget
from autotune.searches.sampler.configuration_space import is_needless
from autotune.searches.sampler.configurations import Configuration, Configurations
from autotune.searches.store.pace import Correction
from autotune.searches.verdict import Verdict
from autotune.techniques import TECHNIQUES, Settings
from autotune.workers import Outcome


@dataclass(frozen=True)
class Result:
    """What came of a trial."""

    settings: Settings
    outcome: Outcome
    verdict: Verdict
    corrections: Mapping[int, Correction] = field(default_factory=dict)
    """What is added to the speeds of all trials so far, by their numbers from 0 on."""


Gains = Callable[[Settings], Mapping[str, tuple[float, float]]]
"""By technique, mean and standard deviation of what it is believed to add to the logarithm of the speed."""

Competitor = Callable[["Problem", int], Generator[Settings, Result, str | None]]
"""From a problem and a seed: yields what to measure, is sent what came of it, returns why it stopped, if it did."""


@dataclass(frozen=True)
class Problem:
    """A search, as a competitor sees it."""

    table: str
    """Its name."""
    predicted: Mapping[str, Prediction | None]
    """What may be measured, by ``settings.canonical()``, and what is known of it beforehand."""
    settings: tuple[Settings, ...]
    budget: Budget

    @cached_property
    def choices(self) -> dict[str, list[Any]]:
        """What each technique may be, in the order of the table; batches ascending. Only where there is a choice."""
        found: dict[str, list[Any]] = {}
        for name in TECHNIQUES:
            values = list(dict.fromkeys(getattr(each, name) for each in self.settings))
            if len(values) > 1:
                found[name] = sorted(values, key=lambda batch: batch.micro) if name == "batch" else values
        return found

    @cached_property
    def ladders(self) -> dict[Settings, list[Settings]]:
        """For each combination of everything but the batch, its configurations by ascending micro-batch."""
        found: dict[Settings, list[Settings]] = {}
        for each in sorted(self.settings, key=micro_batch):
            found.setdefault(each.model_copy(update={"batch": None}), []).append(each)
        return found

    def is_known(self, settings: Settings) -> bool:
        """Whether the table has it."""
        return settings.canonical() in self.predicted

    def is_needless(self, settings: Settings) -> bool:
        """Whether it buys memory with time where none is wanting."""
        largest = self.choices["batch"][-1] if "batch" in self.choices else settings.batch
        usable = math.inf if self.budget.limit is None else self.budget.limit / (1 + self.budget.margin)
        return is_needless(settings, largest, lambda other: self.predicted.get(other.canonical()), usable)

    def predicted_to_fit(self, settings: Settings) -> bool:
        """By the memory model alone, to the byte."""
        known = self.predicted[settings.canonical()]
        return known is not None and self.budget.holds(known.peak_bytes)


@dataclass(frozen=True)
class Space:
    """Parameters as Optuna has them, and the settings that each combination stands for."""

    distributions: dict[str, BaseDistribution]
    by_params: dict[str, Settings]
    batch: str | None
    """The parameter that chooses the batch."""

    def settings(self, params: Mapping[str, Any]) -> Settings | None:
        """None where the table has no such configuration."""
        return self.by_params.get(json.dumps(params, sort_keys=True))

    def params(self, settings: Settings) -> dict[str, Any]:
        """Of a configuration that is in the space."""
        return next(json.loads(key) for key, each in self.by_params.items() if each == settings)

    def configurations(self, problem: Problem, with_needless: bool, gains: Gains) -> Configurations:
        """The same as a set, each configuration once, with what ``gains`` believes of each."""
        once = {each: json.loads(key) for key, each in reversed(self.by_params.items())}
        rows = [
            Configuration(params, micro_batch(each), problem.predicted[each.canonical()], gains(each))
            for each, params in reversed(once.items())
            if with_needless or not problem.is_needless(each)
        ]
        return Configurations(rows, self.distributions, self.batch)

    @classmethod
    def raw(cls, problem: Problem) -> Space:
        """One parameter for each technique."""
        by_params = {}
        for each in problem.settings:
            params = _labels(problem, each)
            if "batch" in problem.choices:
                params["batch"] = problem.choices["batch"].index(each.batch)
            by_params[json.dumps(params, sort_keys=True)] = each
        return cls(_distributions(problem, "batch", len(problem.choices.get("batch", ()))), by_params, "batch")

    @classmethod
    def derived(cls, problem: Problem, num_steps: int = 4) -> Space:
        """A combination, and a share of the largest micro-batch that is predicted to fit: all, the next smaller, ….

        Args:
            problem: what is searched.
            num_steps: shares there are.
        """
        by_params = {}
        for ladder in problem.ladders.values():
            largest = max((at for at, each in enumerate(ladder) if problem.predicted_to_fit(each)), default=0)
            for step in range(num_steps):
                at = max(largest - step, 0)
                params = {**_labels(problem, ladder[at]), "share": step}
                by_params[json.dumps(params, sort_keys=True)] = ladder[at]
        return cls(_distributions(problem, "share", num_steps), by_params, "share")


def micro_batch(settings: Settings) -> int:
    """Samples in one forward pass; 1 where the table does not say."""
    return settings.batch.micro if settings.batch else 1


def _labels(problem: Problem, settings: Settings) -> dict[str, Any]:
    return {name: _label(getattr(settings, name)) for name in problem.choices if name != "batch"}


def _distributions(problem: Problem, batch: str, num_steps: int) -> dict[str, BaseDistribution]:
    found: dict[str, BaseDistribution] = {
        name: CategoricalDistribution([_label(choice) for choice in row])
        for name, row in problem.choices.items()
        if name != "batch"
    }
    if num_steps > 1:
        found[batch] = IntDistribution(0, num_steps - 1)
    return found


def _label(choice: Any) -> str:
    return json.dumps(choice.model_dump(mode="json", exclude_defaults=True), sort_keys=True)
