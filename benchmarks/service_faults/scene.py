"""One search held at a state by its driver, for a fault to be done to it; then it is let go, and looked at."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy import event, text
from sqlalchemy.engine import Engine
from sqlalchemy.ext.compiler import compiles

from autotune.service import supervisor
from autotune.service.service import open_database
from autotune.service.store.database import Database, now
from autotune.service.store.states import NEXT, OPEN, TERMINAL, State
from autotune.service.store.tokens import Tokens
from autotune.service.supervisor import RunnerOptions
from autotune.service.web import following
from autotune.workers.process import with_variable
from tests.postgresql import Cluster

from ..service_place import OPTIONS, Server

LEASE_S, BOUND_S, NUM_TRIALS = 1.0, 60.0, 3
POINTS = ("queued", "starting", "inspecting", "reference", "predicting", "trial", "storing", "finalists", "writing")
POINTS = (*POINTS, "ending", "cancelling")
"""Where a search is held: waiting behind another, and where its driver is."""
PLAN = "schema: autotune/plan@1\nsettings: {}\n"


@dataclass(frozen=True)
class Template:
    """What a scene begins with: a schema, and a token."""

    folder: Path
    token: str
    cluster: Cluster | None


def make_template(folder: Path, cluster: Cluster | None = None) -> Template:
    """A state folder to copy, and with a cluster a database there."""
    url = None if cluster is None else cluster.create("filled")
    database, _ = open_database(folder, url, alone=False)
    token = Tokens(database).create("bench", "admin", None)[1]
    database.close()
    return Template(folder, token, cluster)


class Scene:
    """A server with one search of interest."""

    bound_s = BOUND_S
    """Longest wait for anything."""
    told_again: tuple[int, ...] = ()
    """Trials whose first outcome is nobody's word on them: the job as it stands, where it was killed."""

    def __init__(self, folder: Path, template: Template) -> None:
        self.folder, self.template, self.cluster = folder, template, template.cluster
        self.state = folder / "state"
        shutil.copytree(template.folder, self.state)
        self.url = f"sqlite:///{self.state}/service.db"
        self._database = f"s{time.monotonic_ns()}"
        if self.cluster is not None:
            self.url = self.cluster.create(self._database, "filled")
        self.set_clock(0.0)
        self.options = self.make_options()
        self.server = self.start()
        self.began_bytes = self.server.resident_bytes()
        self.others: list[Server] = []
        self.point = ""
        self.search_id = ""
        self.blocker: str | None = None
        self.more: list[str] = []
        """Searches that a fault has added, and that end as any."""

    def make_options(self) -> RunnerOptions:
        """How searches are run."""
        return replace(OPTIONS, num_searches=1, lease_s=LEASE_S)

    def start(self) -> Server:
        """A server on the state folder."""
        url = None if self.cluster is None else self.url
        return Server(self.state, url, self.options, self.template.token, self._prepare)

    def restart(self) -> None:
        """After its death."""
        self.server = self.start()

    def unlock(self) -> None:
        """Let another server start beside one that has the state folder, as where a shared disk knows no locks."""
        for lock in self.state.glob("*lock"):
            lock.unlink()

    def set_clock(self, ahead_s: float) -> None:
        """How far the clock of a server's SQLite is ahead, from now on."""
        (self.folder / "clock.part").write_text(str(ahead_s))
        (self.folder / "clock.part").rename(self.folder / "clock")

    def _prepare(self) -> None:
        """In the server's process: its database's clock, and waits that are short."""
        clock = self.folder / "clock"
        following._CHECK_S, supervisor._LONGEST_END_S = 0.3, 1.0

        @compiles(now, "sqlite")
        def _now(element: Any, compiler: Any, **options: Any) -> str:
            return "((julianday('now') - 2440587.5) * 86400.0 + ahead_s())"

        @event.listens_for(Engine, "connect")
        def _connected(connection: Any, record: object) -> None:
            if isinstance(connection, sqlite3.Connection):
                connection.create_function("ahead_s", 0, lambda: float(clock.read_text()))

    def job(self, name: str, script: dict[str, Any], padding: int = 0) -> Path:
        """A job's folder, whose driver does as the script says."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "model.py").write_text(json.dumps(script) + " " * padding)
        return folder

    def submit(self, **script: Any) -> str:
        """Queue a search that does as the script says."""
        job = self.job("job", {"trials": NUM_TRIALS, **script})
        return str(self.server.client.submit(job, task="model.py")["id"])

    def hold(self, point: str, **script: Any) -> None:
        """Submit the search, and wait until it is there."""
        self.point = point
        if point == "queued":
            self.blocker = self.submit(holds_at="trial", **script)
            self._until_held(self.blocker)
            self.search_id = self.submit()
            return
        more = {"trials": 1000} if point == "cancelling" else {}  # it is still at them when it is cancelled
        self.search_id = self.submit(holds_at=point, **more, **script)
        if point == "cancelling":
            self.until(lambda: (self.path(self.search_id) / "proof").exists(), "a trial")
            self.server.client.cancel(self.search_id)
        self._until_held(self.search_id)

    def path(self, search_id: str) -> Path:
        """A search's folder."""
        return self.state / "searches" / search_id

    def _until_held(self, search_id: str) -> None:
        self.until((self.path(search_id) / "held").exists, f"the search is not held: {search_id}")

    def until(self, is_so: Any, what: str) -> None:
        """Wait.

        Raises:
            AssertionError: it does not come.
        """
        ends = time.monotonic() + self.bound_s
        while not is_so():
            assert time.monotonic() < ends, f"waited {self.bound_s:.0f} s for: {what}"
            time.sleep(0.02)

    def go(self) -> None:
        """Let go of what is held."""
        for search_id in (self.search_id, self.blocker):
            if search_id is not None and self.path(search_id).is_dir():
                (self.path(search_id) / "go").touch()

    def row(self, search_id: str) -> dict[str, Any]:
        """The search's row as it is, read beside the server; no connection is kept, for a server is a fork."""
        database = Database(self.url)
        with closing(database), database.reading() as connection:
            query = text("SELECT * FROM searches WHERE id = :id")
            return dict(connection.execute(query, {"id": search_id}).one()._mapping)

    def pid(self) -> int:
        """Of the driver that is held."""
        return int(self.row(self.blocker or self.search_id)["pid"])

    def check(self, *allowed: State) -> None:
        """Hold it against the invariants.

        Raises:
            AssertionError: one is broken.
        """
        for search_id in filter(None, (self.search_id, self.blocker, *self.more)):
            self._check(search_id, allowed if search_id == self.search_id else (State.SUCCEEDED,))

    def _check(self, search_id: str, allowed: tuple[State, ...]) -> None:
        client, search = self.server.client, {}

        def has_ended() -> bool:
            search.update(client.search(search_id))
            return search["state"] in TERMINAL

        self.until(has_ended, "the search's end")
        assert search["state"] in allowed, f"{search['state']}: {search['message']}"
        events = list(client.events(search_id))
        assert [each["seq"] for each in events] == [*range(1, search["num_events"] + 1)], "events have gaps"
        states = [State(each["data"]["state"]) for each in events if each["kind"] == "state"]
        for before, after in itertools.pairwise(states):
            assert after in NEXT[before] or (before is after and before in OPEN), f"{before} became {after}"
        assert states[-1] == search["state"]
        trials = list(client.trials(search_id))
        told = [each["data"]["number"] for each in events if each["kind"] == "trial_ended"]
        told = [number for number in told if number not in self.told_again]
        assert len(told) == len(set(told)), f"told twice: {told}"
        assert [each["number"] for each in trials] == [*range(len(trials))], f"trials {trials}"
        self.check_trials(search, states, trials)
        assert with_variable(f"AUTOTUNE_SERVICE_SEARCH={search_id}") == [], "a process is left"
        printed = [
            self.server.log,
            *self.state.glob("searches/*/driver.log"),
            *self.state.glob("searches/*/result.json"),
        ]
        token = self.template.token.encode()
        assert not any(token in path.read_bytes() for path in printed), "the token was printed"

    def check_trials(self, search: dict[str, Any], states: list[State], trials: list[dict[str, Any]]) -> None:
        """Hold them against what their driver has left as a proof.

        Raises:
            AssertionError: they are others.
        """
        search_id = search["id"]
        proof_file = self.path(search_id) / "proof"
        proof = proof_file.read_text().split() if proof_file.exists() else []
        assert len(proof) == len(set(proof)), f"measured twice: {proof}"
        assert {str(each["number"]) for each in trials} <= set(proof), "an outcome without a proof"
        if search["state"] == State.SUCCEEDED:
            assert self.server.client.text(search_id, "plan") == PLAN
            is_cut = self.point == "cancelling" or State.CANCELLING in states or search_id in self.more
            assert is_cut or len(trials) == NUM_TRIALS, trials
            assert len(trials) == len(proof), f"a trial was lost: {trials} of {proof}"

    def close(self) -> None:
        """End all that is left."""
        for server in (self.server, *self.others):
            server.end(signal.SIGKILL)
        for search in self.state.glob("searches/*"):
            for process in with_variable(f"AUTOTUNE_SERVICE_SEARCH={search.name}"):
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        if self.cluster is not None:
            self.cluster.drop(self._database)


@contextmanager
def scene(kind: type[Scene], folder: Path, template: Template) -> Iterator[Scene]:
    """A scene, with its folders."""
    folder.mkdir()
    made = kind(folder, template)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)
