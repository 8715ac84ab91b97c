"""Races for a lease: those that want it stand at a barrier, in threads of several processes, and are let go at once."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from multiprocessing.synchronize import Barrier
from typing import Any

from sqlalchemy import update

from autotune.service.spec import SearchSpec
from autotune.service.store.database import Database
from autotune.service.store.leases import Leases, Stale
from autotune.service.store.searches import Searches
from autotune.service.store.states import State
from autotune.service.store.tables import SEARCHES

_HOME, _SPEC = "races", SearchSpec(task="model.py", folder="/jobs")
_LONGEST_S = 3600.0
KINDS = ("one queue", "a lease that is over", "a claim and a cancel")
"""What is raced for in turn: all claim one search; its holder ends it while the others give it back; one cancels it
while the others claim it."""


def race(url: str, count: int, *, num_processes: int = 2, num_threads: int = 2) -> list[str]:
    """Run races, one search each, that exactly one must win.

    Args:
        url: of a database that has its schema, and no search.
        count: how many; the kinds take turns.
        num_processes: that race.
        num_threads: in each; every one has connections of its own.

    Returns:
        What was broken.
    """
    context = multiprocessing.get_context("spawn")  # no connection is shared, as one is across a fork
    num_racers = num_processes * num_threads
    barrier = context.Barrier(num_racers + 1)
    won = context.Array("b", num_racers, lock=False)
    racers = [
        context.Process(target=_run, args=(url, count, barrier, won, range(first, first + num_threads)))
        for first in range(0, num_racers, num_threads)
    ]
    for process in racers:
        process.start()
    try:
        return [*_judge(url, count, barrier, won)]
    finally:
        barrier.abort()
        for process in racers:
            process.join()


def _judge(url: str, count: int, barrier: Barrier, won: Sequence[int]) -> Iterator[str]:
    with closing(Database(url)) as database:
        searches, leases = Searches(database), Leases(database, _HOME, -1.0)
        for number in range(count):
            kind = KINDS[number % len(KINDS)]
            search_id = searches.submit(_SPEC, "ann", None)[0].id
            if kind == KINDS[1]:
                leases.claim()
            for _ in ("all have read", "go", "all have tried"):
                barrier.wait(_LONGEST_S)
            state, wins = searches.get(search_id).state, list(won)
            by_claim = State.CANCELLED if wins[0] else None
            expected = {KINDS[0]: State.LEASED, KINDS[1]: State.ERROR if wins[0] else State.QUEUED, KINDS[2]: by_claim}
            if sum(wins) != 1 or (expected[kind] or State.CANCELLING) is not state:
                yield f"{kind}, {number}: {wins} won, and it is {state}"
            with database.writing() as connection:
                connection.execute(update(SEARCHES).values(state=State.ERROR, lease_token=None))
            searches.delete(search_id)


def _run(url: str, count: int, barrier: Barrier, won: Any, names: range) -> None:
    threads = [threading.Thread(target=_race, args=(url, count, barrier, won, name)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _race(url: str, count: int, barrier: Barrier, won: Any, name: int) -> None:
    with closing(Database(url)) as database:
        leases, searches = Leases(database, _HOME, 30.0), Searches(database)
        try:
            for number in range(count):
                barrier.wait(_LONGEST_S)
                attempt = _attempt(KINDS[number % len(KINDS)], name, leases, searches)
                barrier.wait(_LONGEST_S)
                won[name] = attempt()
                barrier.wait(_LONGEST_S)
        except threading.BrokenBarrierError:  # the judge has gone
            pass
        except BaseException:
            barrier.abort()
            raise


def _attempt(kind: str, name: int, leases: Leases, searches: Searches) -> Callable[[], bool]:
    if kind == KINDS[1]:
        (lease,) = leases.expired()
        write = partial(leases.give_back, lease, "", is_failure=False)
        return partial(_is_written, partial(leases.finish, lease, State.ERROR, "") if name == 0 else write)
    if kind == KINDS[2] and name == 0:
        (search_id,) = (each.tag[1:17] for each in searches.newest())
        return lambda: searches.cancel(search_id, "finish").state is State.CANCELLED
    return lambda: leases.claim() is not None


def _is_written(write: Callable[[], None]) -> bool:
    try:
        write()
    except Stale:
        return False
    return True
