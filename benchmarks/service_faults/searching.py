"""A real search in the service, held in a measurement on this machine; its task misbehaves where it is asked to."""

from __future__ import annotations

import time
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from sqlalchemy import text

from autotune.service.driver import PROGRAM
from autotune.service.store.database import Database
from autotune.service.store.states import TERMINAL, State
from autotune.service.supervisor import RunnerOptions
from autotune.workers.process import identify
from tests.held_task import HELD

from .scene import Scene

_PATIENCE_S = 30.0
"""The best are measured again until the gain is sure. On a busy machine that takes long: then it is told to finish."""
SPACE = "schema: autotune/space@1\nprecision: auto\n"
MISBEHAVES = '''

held_loss, hoard = compute_loss, []


def compute_loss(model, batch):
    """Once a measurement has gone on, what the first of the files asks for, once, whoever comes first."""
    loss = held_loss(model, batch)
    for name in ("prints", "takes") if num_losses == 30 else ():
        mine = folder / f"{name}-{os.getpid()}"
        try:
            (folder / name).rename(mine)
        except FileNotFoundError:
            continue
        for _ in range(int(mine.read_text())):
            if name == "prints":
                os.write(1, b"x" * 2**20)
            else:
                hoard.append(b"x" * 2**20)
        time.sleep(2.0)
        hoard.clear()
    return loss
'''
"""Added to the task: it prints, or takes, as many MiB as the file says."""


class Searching(Scene):
    """A search that is held in a measurement."""

    bound_s = 300.0
    num_trials, trial_time = 1, "0.2s"

    def make_options(self) -> RunnerOptions:
        """Drivers are real ones."""
        self.held, self.most_lost, self.outcomes = 0, 0, {"measured"}
        options = replace(
            super().make_options(), pauses_s=RunnerOptions.pauses_s
        )  # what has died takes a while to come
        return replace(options, program=PROGRAM, driver_options=self.driver_options())

    def driver_options(self) -> tuple[str, ...]:
        """What runs the trials."""
        return ("--executor=local",)

    def hold(self, point: str, **script: Any) -> None:
        """Submit the search, and wait until it is there."""
        self.point = point
        job = self.folder / "job"
        job.mkdir()
        (job / "model.py").write_text(HELD.format(name="model", folder=str(self.folder)) + MISBEHAVES)
        (job / "space.yaml").write_text(SPACE)
        spec = {"task": "model.py", "space": "space.yaml", "trials": self.num_trials, "trial_time": self.trial_time}
        self.search_id = str(self.server.client.submit(job, **spec, device="cpu")["id"])
        self.until(self.is_held, "a measurement")

    def begun(self) -> set[int]:
        """Pids of all measurements that have begun."""
        return {int(path.name.partition("-")[2]) for path in self.folder.glob("begun-*")}

    def is_held(self) -> bool:
        """Whether one waits; ``held`` is its pid."""
        waiting = (pid for pid in self.begun() if identify(pid) and not (self.folder / f"go-{pid}").exists())
        self.held = next(waiting, 0)
        return self.held > 0

    def pass_reference(self) -> None:
        """Let the job as it stands be measured, however often that is repeated, and wait for the next configuration."""

        def has_passed() -> bool:
            if [*self.server.client.trials(self.search_id)]:
                return self.is_held()
            if self.is_held():
                (self.folder / f"go-{self.held}").touch()
            return False

        self.until(has_passed, "the next configuration")

    def misbehave(self, how: str, mib: int) -> None:
        """Have the next measurement that goes on print, or take, so many MiB."""
        (self.folder / "asked").write_text(str(mib))
        (self.folder / "asked").rename(self.folder / how)

    def has_misbehaved(self, how: str) -> bool:
        """Whether one has."""
        return any(self.folder.glob(f"{how}-*"))

    def go(self) -> None:
        """Let all measurements go on."""
        (self.folder / "go").touch()

    def kept_bytes(self) -> int:
        """Of all files of the search."""
        total = 0
        for path in self.path(self.search_id).rglob("*"):
            with suppress(OSError):
                total += path.lstat().st_size
        return total

    def check(self, *allowed: State) -> None:
        """Hold it against the invariants, once it has ended.

        Raises:
            AssertionError: one is broken.
        """
        since: list[float] = []

        def is_sure() -> bool:
            if not since and self._is_measured_again():
                since.append(time.monotonic())
            has_ended = self.server.client.search(self.search_id)["state"] in TERMINAL
            return has_ended or (bool(since) and time.monotonic() > since[0] + _PATIENCE_S)

        self.until(is_sure, "the best to be measured again")
        self.server.client.cancel(self.search_id)  # changes nothing of what has ended
        super().check(*allowed)

    def _is_measured_again(self) -> bool:
        database = Database(self.url)
        with closing(database), database.reading() as connection:
            query = text("SELECT count(*) FROM events WHERE search_id = :id AND kind = 'finalist_ended'")
            return bool(connection.scalar(query, {"id": self.search_id}))

    def check_trials(self, search: dict[str, Any], states: list[State], trials: list[dict[str, Any]]) -> None:
        """A loss is no outcome; what has begun was said to start, but what was begun again because it was lost."""
        assert {each["outcome"] for each in trials} <= self.outcomes, trials
        started = [each for each in self.server.client.events(self.search_id) if each["kind"] == "trial_started"]
        assert not [*filter(identify, self.begun())], "a measurement is left"
        said = [(each["data"]["number"], each["data"]["round"]) for each in started]
        num_said = sum(1 if round_ is None else 2 for _, round_ in said)  # in a round, it and the reference take turns
        if len(self.begun()) > num_said + self.most_lost:
            raise AssertionError(f"{len(self.begun())} measurements began, and these were said to start: {said}")
        if search["state"] == State.SUCCEEDED:
            assert self.server.client.text(self.search_id, "plan").startswith("schema: autotune/plan")
