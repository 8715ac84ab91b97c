"""Which changes of what the model computes cannot be made to this model: each is made once, before any trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any

from torch.utils.data import default_collate

from ...errors import Caught, PlanError
from ...plan import Plan
from ...randomness import undisturbed
from ...task import Task
from ...techniques import TECHNIQUES, Facts, Settings
from ...training.apply_pieces import apply_to_model, on_two_samples
from ...training.apply_plan import build_model
from ..timing.alarm import alarm

_MOST_S = 30.0
"""Seconds that all of it may take: most cuts are found in 4. What is not known by then, trials tell."""


class _Late(BaseException):
    """The time is up: whatever is running ends, though it catches every Exception."""


def without_refused(task: Task, dataset: Any, facts: Facts, tries: Mapping[str, Sequence[Settings]]) -> Facts:
    """Make each change to a model that is built for it, and leave out what cannot be made.

    Args:
        task: whose model it is.
        dataset: of the task: a cut is found on two samples of it.
        facts: what is known of them.
        tries: by technique, each of its settings alone; empty is what ``auto`` has.

    Returns:
        The facts with what was found: a technique of which nothing can be had is left out.
    """
    run, ends_s = on_two_samples(dataset, task.collate or default_collate, task.compute_loss), monotonic() + _MOST_S
    for name, asked in tries.items():
        every = asked or [Settings(**{name: one}) for one in TECHNIQUES[name].choices(facts)]
        possible = [one for one in every if [*one.chosen()] and getattr(one, name).unavailable(facts) is None]
        found: dict[str, str] = {}
        for settings in possible:
            try:
                with Caught() as raised, _until(ends_s), undisturbed():
                    model = build_model(settings.on_task(task))
                    apply_to_model(Plan(settings=settings), model, blocks=task.blocks, run=run)
            except _Late:
                return facts
            if raised.error is not None:
                found[getattr(settings, name).model_dump_json(exclude_defaults=True)] = _why(raised.error, name)
        if found and len(found) == len(possible):
            facts = facts.model_copy(update={"left_out": {**facts.left_out, name: next(iter(found.values()))}})
        else:
            facts = facts.model_copy(update={"refused": {**facts.refused, **found}})
    return facts


def _why(error: BaseException, name: str) -> str:
    if isinstance(error, PlanError):
        return str(error).removeprefix(f"settings.{name}: ").rstrip(".")
    return f"the model raises {type(error).__name__} with it: {error}"


def _until(ends_s: float) -> AbstractContextManager[None]:
    """
    Raises:
        _Late: it goes on until then.
    """

    def ring() -> None:
        raise _Late

    return alarm(ends_s - monotonic(), ring)
