"""Real searches that are as short as they can be."""

from __future__ import annotations

import threading
from collections.abc import Callable

from autotune.plan import Plan
from autotune.searches.driver import search
from autotune.searches.events import Event, FinalistEnded, TrialEnded
from autotune.searches.options import SearchOptions
from autotune.workers import Executor


def search_until_a_trial(options: SearchOptions, executor: Executor) -> tuple[Plan, list[Event]]:
    """The plan once the reference and one other configuration are measured, and what happened; finalists, which are
    measured in fresh interpreters, are other tests'."""
    return _search_until(lambda event: isinstance(event, TrialEnded) and event.number == 1, options, executor)


def search_until_a_round(options: SearchOptions, executor: Executor) -> tuple[Plan, list[Event]]:
    """The plan once the winner and the reference have run once more in fresh interpreters: how often they have to is
    shown over tables."""
    return _search_until(lambda event: isinstance(event, FinalistEnded) and event.number == 0, options, executor)


def _search_until(
    is_enough: Callable[[Event], bool], options: SearchOptions, executor: Executor
) -> tuple[Plan, list[Event]]:
    stop = threading.Event()
    events: list[Event] = []

    def observe(event: Event) -> None:
        events.append(event)
        if is_enough(event):
            stop.set()

    return search(options, executor, observe, stop), events
