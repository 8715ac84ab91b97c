"""Runs searches: takes queued ones, follows each driver in a thread, and recovers those of dead servers."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from sqlalchemy.exc import SQLAlchemyError

from ..errors import Caught
from ..workers.process import ProcessId
from .driver import end_leftovers
from .store.database import words_of
from .store.leases import Lease, Leases, Stale
from .store.states import State
from .supervisor import REFUSED, Places, RunnerOptions, Supervisor
from .turns import SearchTurns
from .users import User, Users

_LOG = logging.getLogger("autotune.service")


class Runner:
    """Runs searches until it is closed."""

    def __init__(self, leases: Leases, places: Places, options: RunnerOptions) -> None:
        """Nothing runs before :meth:`start`. The caller holds the state folder alone: every lease of a search in it
        that is there already is a dead server's."""
        self._leases, self._places, self.options = leases, places, options
        self._turns = SearchTurns(options.is_cluster)
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._held: dict[str, Lease] = {}
        self._busy: dict[str, User] = {}
        """The users that searches have, by the searches' ids."""
        self._shortage: str | None = None
        self._pool = ThreadPoolExecutor(options.num_searches, thread_name_prefix="search")
        self._thread = threading.Thread(target=self._run, name="runner", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wake(self) -> None:
        """Wake up: there may be work."""
        self._wake.set()

    def is_alive(self) -> bool:
        """Whether it still takes searches."""
        return self._thread.is_alive()

    @property
    def num_running(self) -> int:
        """Searches that are worked on here."""
        return len(self._held)

    def queue(self) -> list[tuple[str, str]]:
        """Ids and owners of the searches that wait here, the next first."""
        return self._leases.queue()

    def waits_for(self) -> dict[str, list[str]]:
        """By the id of each search that waits for a device, the ids of those whose trials run."""
        return self._turns.waits_for()

    def close(self) -> None:
        """End the drivers, keeping what they measured, and give their searches back."""
        self._stop.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._pool.shutdown(wait=True)

    def _run(self) -> None:
        everything, look_at = True, 0.0
        while not self._stop.is_set():
            self._wake.clear()
            try:
                if time.monotonic() >= look_at:  # leases end by time alone: nothing that wakes it ends one
                    self._recover(all_held=everything)
                    everything, look_at = False, time.monotonic() + 2 * self.options.beat_s
                while self._may_begin() and self._begin_next():
                    pass
            except SQLAlchemyError as reason:
                _LOG.error("the database failed: %s; trying again", words_of(reason))
            self._wake.wait(2 * self.options.beat_s)

    def _may_begin(self) -> bool:
        """Whether a place is free and there is room; the log says once that there is none, and once that there is."""
        before, self._shortage = self._shortage, self._places.shortage()
        if self._shortage != before:
            _LOG.error("%s: %s", self._places.state, self._shortage or "Searches begin again.")
        return self._shortage is None and len(self._held) < self.options.num_searches

    def _begin_next(self) -> bool:
        """Begin the search that is next, of those whose user has none that runs; whether there was one."""
        users = self.options.run_as
        free = None if users is None else self._free(users)
        lease = self._leases.claim(free)
        if lease is None:
            return False
        user = None if free is None else free[lease.owner]
        with self._lock:
            self._held[lease.search_id] = lease
            if user is not None:
                self._busy[lease.search_id] = user
        self._pool.submit(self._work, lease, user)
        return True

    def _free(self, users: Users) -> dict[str, User | None]:
        """Owners of waiting searches with their users, but for those whose user has a search that runs. Who has none is
        told so by the search."""
        with self._lock:
            busy = {user.uid for user in self._busy.values()}
        found = {owner: users.find(owner) for owner in self._leases.owners()}
        return {owner: user for owner, user in found.items() if user is None or user.uid not in busy}

    def _work(self, lease: Lease, user: User | None) -> None:
        try:
            with Caught(frames=True) as raised:
                options = replace(self.options, user=user)
                Supervisor(lease, self._leases, self._places, options, self._stop, self._turns).run()
            if isinstance(reason := raised.error, SQLAlchemyError):  # the lease ends, and the search is taken in again
                _LOG.error("search %s: the database failed: %s", lease.search_id, words_of(reason))
            elif reason is not None:  # a bug with one search must not end the others
                _LOG.error("search %s: a bug", lease.search_id, exc_info=reason)
                with suppress(Stale, SQLAlchemyError):
                    said = "a bug in autotune: the server's log has what is known of it."
                    self._leases.finish(lease, State.ERROR, said)
        finally:
            with self._lock:
                del self._held[lease.search_id]
                self._busy.pop(lease.search_id, None)
            self._wake.set()

    def _recover(self, *, all_held: bool) -> None:
        """Give back the searches of servers that died, once nothing of their drivers is left."""
        mine = {lease.token for lease in list(self._held.values())}
        for lease in self._leases.expired(all_held=all_held):
            if lease.token in mine:  # a clock jumped: this server knows better
                continue
            _LOG.warning("search %s: its server was lost", lease.search_id)
            driver = None if lease.pid is None else ProcessId(lease.pid, lease.pid_start or 0)
            end_leftovers(lease.search_id, lease.attempt, driver)
            supervisor = Supervisor(lease, self._leases, self._places, self.options, self._stop, self._turns)
            try:
                supervisor.take_in()
                self._leases.give_back(
                    lease, "its server was lost; it goes on from what was measured", is_failure=False
                )
            except Stale:
                continue
            except REFUSED as reason:
                supervisor.give_up(reason)
