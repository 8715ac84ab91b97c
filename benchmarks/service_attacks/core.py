"""What an attack is, and what all of them begin with: services that run, tokens, and searches of somebody else."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from autotune.service.client import Client
from tests.filled_service import fill

from ..rows import HERE

ROOT = HERE.parent
TASK = "def build_model(): ...\ndef build_dataset(): ...\ndef compute_loss(model, batch): ...\n"
"""What a task is known by, before it is run."""
SLEEPS = "import time\ntime.sleep(3600)\n"
"""A task that is read for as long as anybody looks."""
FAILS = "raise RuntimeError('this task cannot be read')\n"
SECRETS = {"HF_TOKEN": "hf_very-secret-1", "AWS_SECRET_ACCESS_KEY": "very-secret-2", "MY_PASSWORD": "very-secret-3"}
"""In the admin's environment."""
_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Attack:
    """One attempt."""

    name: str
    do: Callable[[Scene], str | None]
    """Returns what does not hold; None where all does."""


@dataclass
class Served:
    """``autotune serve`` in a process of its own."""

    name: str
    state: Path
    port: int
    log: Path
    process: subprocess.Popen[bytes]
    tokens: dict[str, str] = field(default_factory=dict)
    """By the names of their owners."""

    @property
    def url(self) -> str:
        """Of the service."""
        return f"http://127.0.0.1:{self.port}"

    def client(self, who: str) -> Client:
        """Of the owner of a token."""
        return Client(self.url, self.tokens[who])

    def said(self) -> str:
        """Its log so far."""
        return self.log.read_text(errors="replace")


@dataclass
class Scene:
    """The services, and searches that nobody but their owners may change."""

    folder: Path
    stack: ExitStack
    services: dict[str, Served] = field(default_factory=dict)
    victims: dict[str, dict[str, str]] = field(default_factory=dict)
    """Ids by state, by service."""
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=30.0))

    @property
    def main(self) -> Served:
        """As ``autotune serve`` starts where nothing else is asked for."""
        return self.services["main"]

    def ask(self, method: str, path: str, who: str | None = None, at: str = "main", **more: Any) -> httpx.Response:
        """One request, by the owner of a token or nobody.

        Raises:
            AssertionError: it is answered as a failure of the service.
        """
        service = self.services[at]
        headers = dict(more.pop("headers", {}))
        if who is not None:
            headers["Authorization"] = f"Bearer {service.tokens[who]}"
        self.http.cookies.clear()
        answer = self.http.request(method, service.url + path, headers=headers, **more)
        assert answer.status_code < 500, f"{answer.status_code}: {answer.text[:200]}"
        return answer

    def facts(self, at: str) -> Any:
        """What no attacker may change: the victims, as an admin sees them, and all tokens that are valid."""
        rows = self.ask("GET", "/v1/searches?limit=500", "eve", at).json()
        mine = {*self.victims.get(at, {}).values()}
        kept = ("id", "owner", "name", "priority", "cancel_mode", "has_plan", "spec", "attempt", "state")
        tokens = [each for each in self.ask("GET", "/v1/tokens", "eve", at).json() if each["revoked_at"] is None]
        return [[row[name] for name in kept] for row in rows if row["id"] in mine], tokens

    def raw(self, data: bytes, at: str = "main", quiet_s: float = 1.0) -> bytes:
        """Bytes as they are, and all that is answered until the connection is closed or nothing comes any more."""
        with socket.create_connection(("127.0.0.1", self.services[at].port), 10) as connection:
            connection.settimeout(quiet_s)
            answer = b""
            try:
                connection.sendall(data)
                while part := connection.recv(2**16):
                    answer += part
            except OSError:
                pass
            return answer


def expect(answer: httpx.Response, *statuses: int) -> str | None:
    """What is wrong with an answer that is to have one of these statuses, and words that are JSON where it refuses."""
    if answer.status_code not in statuses:
        return f"{answer.status_code} and not {' or '.join(map(str, statuses))}: {answer.text[:160]}"
    if answer.status_code >= 400 and not answer.headers["content-type"].startswith("application/problem+json"):
        return f"{answer.status_code} is no problem+json"
    return None


def statuses(answer: bytes) -> list[int]:
    """Of all answers in what came by a connection."""
    return [int(each) for each in re.findall(rb"HTTP/1\.[01] (\d{3})", answer)]


@contextmanager
def scene() -> Iterator[Scene]:
    """The services, as an admin starts them."""
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="autotune-attacks-", ignore_cleanup_errors=True))
        )
        the = Scene(folder, stack)
        stack.callback(the.http.close)
        fill(folder / "main", 12)
        fill(folder / "private", 12)
        more: dict[str, tuple[str, ...]] = {
            "main": (),
            "private": ("--private",),
            "near": ("--behind-proxy=127.0.0.1",),
            "far": ("--behind-proxy=10.9.9.9",),
            "tasks": ("--searches=2",),
        }
        for name, options in more.items():
            start(the, name, *options)
        for name in more:
            settle(the, the.services[name])
        for name in ("main", "private"):
            the.victims[name] = _submit_victims(the, the.services[name])
        yield the


def start(the: Scene, name: str, *options: str, before: tuple[str, ...] = (), home: Path | None = None) -> Served:
    """``autotune serve`` with these options, after the words ``before``; its first token is made as an admin does."""
    state, log = the.folder / name, the.folder / f"{name}.log"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    environment = {**os.environ, **SECRETS, "PYTHONPATH": str(ROOT), **({"HOME": str(home)} if home else {})}
    autotune = [*before, sys.executable, "-m", "autotune", "serve"]
    token = subprocess.run(
        [*autotune, "token", "create", "--role=admin", "--name=eve", f"--state={state}"],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*autotune, f"--state={state}", f"--port={port}", "--executor=local", *options],
            env=environment,
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    served = the.services[name] = Served(name, state, port, log, process, {"eve": token})
    the.stack.callback(_end, served)
    return served


def _end(served: Served) -> None:
    served.process.terminate()
    try:
        served.process.wait(30)
    except subprocess.TimeoutExpired:
        served.process.kill()
        served.process.wait()


def settle(the: Scene, served: Served) -> None:
    """Wait until it is ready, and make the other tokens: of two who submit, of a reader, one that has expired, one that
    was revoked."""
    until(partial(_is_ready, the, served), f"{served.name}: ready")
    for name, role in (("ann", "submit"), ("mallory", "submit"), ("rita", "read"), ("old", "admin"), ("gone", "admin")):
        body = {"name": name, "role": role, "expires": "1s" if name == "old" else "1h"}
        made = the.ask("POST", "/v1/tokens", "eve", served.name, json=body).json()
        served.tokens[name] = made["token"]
        if name == "gone":
            the.ask("DELETE", f"/v1/tokens/{made['id']}", "eve", served.name)


def _is_ready(the: Scene, served: Served) -> bool:
    if served.process.poll() is not None:
        raise RuntimeError(served.said()[-2000:])
    try:
        return the.http.get(f"{served.url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def _submit_victims(the: Scene, served: Served) -> dict[str, str]:
    """Ann's searches, and those that were there: one of each state."""
    with served.client("ann") as client:
        running = client.submit(job(the.folder / "sleeps", SLEEPS), task="model.py", name="runs", priority=99)["id"]
        until(lambda: client.search(running)["state"] == "RUNNING", "a search that runs")
        queued = client.submit(the.folder / "sleeps", task="model.py", name="waits", priority=1)["id"]
    with served.client("eve") as client:
        rows = {row["state"]: row["id"] for row in client.searches() if row["state"] not in ("RUNNING", "QUEUED")}
    return {**rows, "RUNNING": running, "QUEUED": queued}


def job(folder: Path, model: str, **files: str) -> Path:
    """A job's folder with a task of these lines, and other files (``space__yaml`` is ``space.yaml``)."""
    folder.mkdir(exist_ok=True)
    for name, text in {"model__py": f"{TASK}{model}", **files}.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def until(is_so: Callable[[], Any], what: str, patience_s: float = _PATIENCE_S) -> None:
    """Wait.

    Raises:
        TimeoutError: it does not come.
    """
    ends = time.monotonic() + patience_s
    while not is_so():
        if time.monotonic() > ends:
            raise TimeoutError(f"waited {patience_s:.0f} s for {what}")
        time.sleep(0.05)


def attempts(
    do: Callable[..., str | None], values: Mapping[str, Any] | tuple[Any, ...] | list[Any], words: str = "{}"
) -> Iterator[Attack]:
    """One attack for each value, which is given to ``do`` behind the scene."""
    named = values if isinstance(values, Mapping) else {_shown(value): value for value in values}
    for name, value in named.items():
        yield Attack(words.format(name), lambda the, value=value: do(the, value))  # type: ignore[misc]


def bound(do: Callable[..., str | None], **more: Any) -> Callable[[Scene], str | None]:
    """What is done, with what it needs."""
    return lambda the: do(the, **more)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    return text.encode("ascii", "backslashreplace").decode()[:100]
