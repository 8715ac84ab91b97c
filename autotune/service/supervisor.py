"""One search while it is worked on: its files, its driver, what that says, and what it comes to."""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError

from ..errors import StudyError, TrialsLost
from ..units import format_bytes
from .archives import Limits, unpack
from .driver import PROGRAM, Driver, SearchFolder
from .findings import Documents, Summary
from .problems import Problem
from .store.database import words_of
from .store.leases import PAUSES_S, Lease, Leases, Stale
from .store.states import State
from .turns import SearchTurns
from .users import User, Users

_LOG = logging.getLogger("autotune.service")
_INTERRUPTED = 130
_LONGEST_END_S = 60.0
"""After ``now``, and when the server ends: a driver that goes on for longer is killed."""
_LOOK_S = 0.2
LEAST_FREE_BYTES = 16 * 2**20
"""With less on the state folder's disk no search is begun: a driver could not even say why it ends."""
_NO_ROOM = ("No space left on device", "Disk quota exceeded", "database or disk is full")
"""What a system and SQLite say of a full disk."""
REFUSED = (DataError, IntegrityError)
"""What a database answers to values that it takes from nobody, however often they are written."""


@dataclass(frozen=True)
class Places:
    """The state folder."""

    state: Path
    limits: Limits = field(default_factory=Limits)

    @property
    def archives(self) -> Path:
        """Archives by their hashes."""
        return self.state / "archives"

    @property
    def predictions(self) -> Path:
        """Of jobs' memory, which were asked for."""
        return self.state / "predictions"

    def shortage(self) -> str | None:
        """Why no search can be begun here, in words; None where there is room, and it can be written."""
        try:
            disk = os.statvfs(self.state)
        except OSError as reason:
            return f"The service's folder cannot be used: {reason.strerror}. Searches wait until it is back."
        if not os.access(self.state, os.W_OK):
            return "The service's folder is read-only for the server: searches wait until it can be written."
        if disk.f_bavail * disk.f_frsize >= LEAST_FREE_BYTES and (disk.f_favail or not disk.f_files):
            return None
        return f"The service's disk is full (less than {format_bytes(LEAST_FREE_BYTES)} free): searches wait for room."

    def search(self, search_id: str) -> SearchFolder:
        """The folder of one search."""
        return SearchFolder(self.state / "searches" / search_id)


@dataclass(frozen=True)
class RunnerOptions:
    """Options of a server's drivers."""

    num_searches: int = 1
    """Searches at a time, which take turns on devices by trial."""
    lease_s: float = 30.0
    """A lease without a sign of life ends after so many seconds."""
    beat_s: float = 0.5
    """Between two looks at a driver, seconds."""
    pauses_s: tuple[float, ...] = PAUSES_S
    """Before each further try of a search whose driver failed, seconds."""
    program: tuple[str, ...] = PROGRAM
    """The command that starts ``autotune``."""
    driver_options: tuple[str, ...] = ()
    """Options of ``autotune search`` that are the server's to decide."""
    is_cluster: bool = False
    """Trials run on a Ray cluster that was there before."""
    pass_env: tuple[str, ...] = ()
    """Environment variables that drivers and tasks get, whatever is in them."""
    run_as: Users | None = None
    """Whose processes drivers and tasks are; None is the server's own user."""
    user: User | None = None
    """The one of ``run_as`` that one search has; None where there is none for its owner."""


class Supervisor:
    """Works on one search under its lease."""

    def __init__(
        self,
        lease: Lease,
        leases: Leases,
        places: Places,
        options: RunnerOptions,
        stop: threading.Event,
        turns: SearchTurns,
    ) -> None:
        self._lease, self._leases, self._options, self._stop = lease, leases, options, stop
        self._places, self._turns = places, turns
        self._folder = places.search(lease.search_id)
        self._summary = Summary(lease.summary)
        self._offset = lease.progress_offset
        self._unwritten: tuple[list[dict[str, Any]], int, Summary] | None = None

    def run(self) -> None:
        """From the lease to the end of the search, or of the lease."""
        if self._lease.cancel_mode == "now":
            with suppress(Stale):
                self._finish(State.CANCELLED, "cancelled")
            return
        lease = self._lease
        if (users := self._options.run_as) is not None and self._options.user is None:
            with suppress(Stale):
                self._give_back(users.why_none(lease.owner), is_failure=True)
            return
        try:
            self._prepare()
            driver = Driver(lease.search_id, lease.spec, self._folder, lease.attempt, self._options, self._turns)
        except Problem as problem:
            with suppress(Stale):
                if problem.status == 507:
                    self._give_back(problem.detail, is_failure=True)
                else:
                    self._finish(State.FAILED if problem.status == 422 else State.ERROR, problem.detail)
            return
        except OSError as reason:
            with suppress(Stale):
                self._give_back(f"its driver could not be started: {reason.strerror}.", is_failure=True)
            return
        try:
            self._summary.begin(time.time())
            self._leases.begin(lease, driver.id.pid, driver.id.start, self._summary.as_json())
            _LOG.info("search %s: driver %s started", lease.search_id, driver.id.pid)
            self._follow(driver)
        except Stale:
            _LOG.warning("search %s: somebody else has it now; what came of it here is dropped", lease.search_id)
        except REFUSED as reason:
            driver.end()
            self.give_up(reason)
        finally:
            driver.end()

    def give_up(self, reason: SQLAlchemyError) -> None:
        """End a search whose driver says what the database does not take."""
        said = f"the database does not take what its driver reported: {words_of(reason)}."
        _LOG.error("search %s: %s", self._lease.search_id, said)
        with suppress(Stale):
            self._finish(State.ERROR, f"{said} What was measured is kept: resume it, or submit the job again.")

    def take_in(self) -> None:
        """Store what the last driver said and nobody has read.

        Raises:
            Stale: the search is somebody else's.
        """
        while self._record():
            pass

    def _prepare(self) -> None:
        """Lay out the job's files, once.

        Raises:
            Problem: they cannot be.
        """
        work, spec = self._folder.work, self._lease.spec
        if work.exists():
            return
        if spec.archive is None:
            work.mkdir(parents=True)
            return
        archive = self._places.archives / spec.archive
        if not archive.is_file():
            raise Problem(
                500,
                f"the archive {spec.archive} is gone from the service's folder. Submit the job again; or put the "
                "archive back, and resume this search.",
            )
        half = self._folder.path / "work.part"
        shutil.rmtree(half, ignore_errors=True)
        unpack(archive, half, self._places.limits)
        half.rename(work)

    def _follow(self, driver: Driver) -> None:
        """Until the driver ends.

        Raises:
            Stale: the search is somebody else's.
        """
        asked, kill_at, next_beat = 0, math.inf, 0.0
        mode = self._lease.cancel_mode
        while (code := driver.exit_code()) is None:
            if time.monotonic() >= next_beat:
                try:
                    mode = self._leases.keep(self._lease)
                    self._record()
                except REFUSED:
                    raise
                except SQLAlchemyError as reason:  # it may come back before the lease ends
                    _LOG.error("search %s: the database failed: %s", self._lease.search_id, words_of(reason))
                self._folder.cut_log()
                next_beat = time.monotonic() + min(self._options.beat_s, self._options.lease_s / 3)
            at_once = mode == "now" or self._stop.is_set()
            if asked < (2 if at_once else int(mode == "finish" and self._may_finish())):
                driver.ask_to_end()
                asked += 1
                if asked == 2:
                    kill_at = time.monotonic() + _LONGEST_END_S
            if time.monotonic() > kill_at:
                driver.end()
            self._turns.advance()
            with suppress(subprocess.TimeoutExpired):
                driver.process.wait(_LOOK_S)  # two signals within a moment would count as one
        driver.end()
        is_short = self._places.shortage() is not None  # before what may last until there is room
        while self._retried(self._record):
            pass
        _LOG.info("search %s: driver ended with %s", self._lease.search_id, code)
        self._conclude(code, mode, was_asked=asked > 0, is_short=is_short)

    def _may_finish(self) -> bool:
        """A driver that goes on from a study reads it first: interrupted before that, it would end without a plan."""
        return self._lease.attempt == 1 or self._summary.has_started

    def _conclude(self, code: int, mode: str | None, *, was_asked: bool, is_short: bool) -> None:
        """``is_short`` says that nothing could be written when the driver ended, which is then nobody's fault."""
        found, (error, kind) = self._folder.read_documents(), self._folder.read_error()
        at_once = mode == "now" or self._stop.is_set()  # else nobody here kills it
        was_ended = code == _INTERRUPTED or (was_asked and (code == -signal.SIGTERM or (code < 0 and at_once)))
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        is_lost = is_short or kind == TrialsLost.__name__ or any(words in error for words in _NO_ROOM)
        if not error and (code == 2 or is_short):  # it could not say why
            is_lost, error = True, f"its driver ended with {how}: {self._last_words().splitlines()[-1]}"
        if found is not None and (code == 0 or (code == _INTERRUPTED and mode == "finish")):
            self._finish(State.SUCCEEDED, "" if code == 0 else "ended early: the best so far", found)
        elif is_lost and mode == "now":
            self._finish(State.CANCELLED, "cancelled")
        elif is_lost:
            self._give_back(error.partition("\n")[0], is_failure=not is_short)
        elif code == 0:
            self._finish(State.ERROR, "the driver ended well, and left no plan that can be read.")
        elif code in _ENDS:
            self._finish(State.ERROR if kind == StudyError.__name__ else _ENDS[code], error or self._last_words())
        elif was_ended and (mode == "now" or (mode == "finish" and not self._stop.is_set())):
            self._finish(State.CANCELLED, error or "cancelled")
        elif was_ended and self._stop.is_set():
            self._give_back("the server was stopped; it goes on from what was measured", is_failure=False)
        else:
            self._give_back(f"its driver was lost ({how}).", is_failure=True)

    def _finish(self, state: State, message: str, found: Documents | None = None) -> None:
        summary = None if found is None else {**self._summary.as_json(), "result": found.result}
        self._retried(lambda: self._leases.finish(self._lease, state, message, found, summary))

    def _give_back(self, message: str, *, is_failure: bool) -> None:
        """A disk that is full is nobody's failure: nothing is begun before there is room."""
        if shortage := self._places.shortage():
            message, is_failure = f"{message} {shortage}", False
        self._retried(lambda: self._leases.give_back(self._lease, message, is_failure=is_failure))

    def _record(self) -> bool:
        """What could not be written is written again as it was: where it was, and the answer was lost, it is known."""
        if self._unwritten is None:
            rows, offset = self._folder.read_progress(self._lease.attempt, self._offset)
            if offset == self._offset:
                return False
            summary = deepcopy(self._summary)
            for row in rows:
                with suppress(KeyError, TypeError):  # a task may write there, too
                    summary.take(row)
            self._unwritten = rows, offset, summary
        rows, offset, summary = self._unwritten
        self._leases.record(self._lease, rows, offset, summary.as_json())
        self._summary, self._offset, self._unwritten = summary, offset, None
        return True

    def _retried(self, write: Callable[[], bool | None]) -> bool | None:
        """What must not be lost is written again until the database answers, or the server ends."""
        while True:
            try:
                return write()
            except REFUSED:
                raise
            except SQLAlchemyError as reason:
                _LOG.error("search %s: the database failed: %s", self._lease.search_id, words_of(reason))
                if self._stop.wait(1.0):
                    raise

    def _last_words(self) -> str:
        return self._folder.read_log()[-2000:].strip() or "it ended without a word."


_ENDS = {1: State.ERROR, 2: State.FAILED, 3: State.NOTHING_FITS}
"""What a driver's exit code says; a ``StudyError`` has a user's, and the study lies in our folder."""
