"""A real search that is as short as one can be."""

from __future__ import annotations

import threading

from autotune.plan import Plan
from autotune.search.driver import search
from autotune.search.events import Event, TrialEnded
from autotune.search.options import SearchOptions
from autotune.workers import Executor


def search_until_a_trial(options: SearchOptions, executor: Executor) -> tuple[Plan, list[Event]]:
    """The plan once the reference and one other configuration are measured, and what happened; finalists, which are
    measured in fresh interpreters, are other tests'."""
    stop = threading.Event()
    events: list[Event] = []

    def observe(event: Event) -> None:
        events.append(event)
        if isinstance(event, TrialEnded) and event.number == 1:
            stop.set()

    return search(options, executor, observe, stop), events
