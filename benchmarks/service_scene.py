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
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.service.service import open_database
from autotune.service.store.states import NEXT, OPEN, TERMINAL, State
from autotune.service.store.tokens import Tokens
from autotune.workers.process import with_variable

from .service_place import OPTIONS, Server

__all__ = ["LEASE_S", "POINTS", "Scene", "make_template", "scene"]

LEASE_S, BOUND_S, NUM_TRIALS = 1.0, 60.0, 3
POINTS = ("queued", "starting", "inspecting", "reference", "trial", "storing", "finalists", "writing", "ending")
"""Where a search is held: waiting behind another, and where its driver is."""
POINTS = (*POINTS, "cancelling")
PLAN = "schema: autotune/plan@1\nsettings: {}\n"


def make_template(folder: Path) -> str:
    """A state folder with a schema and a token, to copy; return the token."""
    database, _ = open_database(folder, None, alone=False)
    token = Tokens(database).create("bench", "admin", None)[1]
    database.close()
    return token


class Scene:
    """A server with one search of interest."""

    def __init__(self, folder: Path, template: Path, token: str, url: str | None = None) -> None:
        self.state, self.token, self.url = folder / "state", token, url
        shutil.copytree(template, self.state)
        self.options = replace(OPTIONS, num_searches=1, lease_s=LEASE_S)
        self.server = self.start()
        self.others: list[Server] = []
        self.point = ""
        self.search_id = ""
        self.blocker: str | None = None

    def start(self) -> Server:
        """A server on the state folder."""
        return Server(self.state, self.url, self.options, self.token)

    def restart(self) -> None:
        """After its death."""
        self.server = self.start()

    def submit(self, **script: Any) -> str:
        """Queue a search that does as the script says."""
        job = self.state.parent / "job"
        job.mkdir(exist_ok=True)
        (job / "model.py").write_text(json.dumps({"trials": NUM_TRIALS, **script}))
        return str(self.server.client.submit(job, task="model.py")["id"])

    def hold(self, point: str) -> None:
        """Submit the search, and wait until it is there."""
        self.point = point
        if point == "queued":
            self.blocker = self.submit(holds_at="trial")
            self._until_held(self.blocker)
            self.search_id = self.submit()
            return
        more = {"trials": 1000} if point == "cancelling" else {}  # it is still at them when it is cancelled
        self.search_id = self.submit(holds_at=point, **more)
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
        ends = time.monotonic() + BOUND_S
        while not is_so():
            assert time.monotonic() < ends, f"waited {BOUND_S:.0f} s for: {what}"
            time.sleep(0.02)

    def go(self) -> None:
        """Let go of what is held."""
        for search_id in (self.search_id, self.blocker):
            if search_id is not None and self.path(search_id).is_dir():
                (self.path(search_id) / "go").touch()

    def row(self, search_id: str) -> Any:
        """The search's row as it is, read beside the server (SQLite)."""
        with closing(sqlite3.connect(f"file:{self.state}/service.db?mode=ro", uri=True, timeout=30)) as connection:
            connection.row_factory = sqlite3.Row
            return connection.execute("SELECT * FROM searches WHERE id = ?", [search_id]).fetchone()

    def check(self, *allowed: State) -> None:
        """Hold it against the invariants.

        Raises:
            AssertionError: one is broken.
        """
        for search_id in filter(None, (self.search_id, self.blocker)):
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
        trials = [each["number"] for each in client.trials(search_id)]
        proof_file = self.path(search_id) / "proof"
        proof = proof_file.read_text().split() if proof_file.exists() else []
        assert len(proof) == len(set(proof)), f"measured twice: {proof}"
        assert trials == [*range(len(trials))], f"trials {trials}"
        assert {str(n) for n in trials} <= set(proof), "an outcome without a proof"
        if search["state"] == State.SUCCEEDED:
            assert client.text(search_id, "plan") == PLAN
            assert self.point == "cancelling" or State.CANCELLING in states or len(trials) == NUM_TRIALS, trials
            assert len(trials) == len(proof), f"a trial was lost: {trials} of {proof}"
        assert with_variable(f"AUTOTUNE_SERVICE_SEARCH={search_id}") == [], "a process is left"
        printed = [
            self.server.log,
            *self.state.glob("searches/*/driver.log"),
            *self.state.glob("searches/*/result.json"),
        ]
        assert not any(self.token in path.read_text(errors="replace") for path in printed), "the token was printed"

    def close(self) -> None:
        """End all that is left."""
        for server in (self.server, *self.others):
            server.end(signal.SIGKILL)


@contextmanager
def scene(folder: Path, template: Path, token: str, url: str | None = None) -> Iterator[Scene]:
    """A scene, with its folders."""
    folder.mkdir()
    made = Scene(folder, template, token, url)
    try:
        yield made
    finally:
        made.close()
        for search in made.state.glob("searches/*"):
            for process in with_variable(f"AUTOTUNE_SERVICE_SEARCH={search.name}"):
                os.kill(process.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
