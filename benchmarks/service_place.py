"""A server in a process of its own, forked from this one: with a driver that takes no time, and nothing to import."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import uvicorn

from autotune.commands.service.serve import run
from autotune.service.client import Client
from autotune.service.service import open_service
from autotune.service.supervisor import RunnerOptions
from autotune.service.web.app import make_app
from autotune.service.web.limits import BoundedProtocol

from .rows import HERE

DRIVER = (sys.executable, "-S", "-E", str(HERE.parent / "tests" / "service_driver.py"))
OPTIONS = RunnerOptions(num_searches=2, lease_s=5.0, beat_s=0.05, pauses_s=(0.1, 0.1), program=DRIVER)


class Server:
    """``autotune serve`` on a port of its own, until :meth:`end`. This process must have one thread."""

    def __init__(
        self,
        state: Path,
        url: str | None = None,
        options: RunnerOptions = OPTIONS,
        token: str | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """Start it, and wait until it listens; ``prepare`` is called in its process first.

        Raises:
            RuntimeError: it ended at once; its log says why.
        """
        self.log = state.parent / f"{state.name}.log"
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = listening.getsockname()[1]
        self.pid = os.fork()
        if self.pid == 0:
            _serve(state, url, replace(options), listening, self.log, prepare)
        listening.close()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = Client(self.url, token)
        self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if self.has_ended():
                raise RuntimeError(self.log.read_text()[-2000:])
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 5) as probe:
                probe.settimeout(5)
                probe.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                if probe.recv(20).startswith(b"HTTP/1.1 200"):
                    return
            time.sleep(0.02)
        raise RuntimeError("the server does not answer")

    def has_ended(self) -> bool:
        """Whether it is gone; it is waited for then."""
        if self.pid:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                    return False
            self.pid = 0
        return True

    def send(self, *signals: int) -> None:
        """Send signals, one after the other."""
        for each in signals:
            if not self.has_ended():
                os.kill(self.pid, each)
                time.sleep(0.05)

    def end(self, how: int = signal.SIGKILL, patience_s: float = 90.0) -> None:
        """Send a signal, and wait for its end."""
        self.send(signal.SIGCONT, how)
        until = time.monotonic() + patience_s
        while not self.has_ended():
            if time.monotonic() > until:
                raise RuntimeError("the server does not end")
            time.sleep(0.01)

    def resident_bytes(self) -> int:
        """Of the server alone."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def cpu_s(self) -> float:
        """Of the server alone, since its start."""
        fields: Sequence[str] = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def wait_s(self) -> float:
        """How long the threads that it has were ready to run, and others had the processors, since its start."""
        waited_ns = 0
        for each in Path(f"/proc/{self.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                waited_ns += int(each.read_text().split()[1])
        return waited_ns / 1e9


def _serve(
    state: Path,
    url: str | None,
    options: RunnerOptions,
    listening: socket.socket,
    log: Path,
    prepare: Callable[[], None],
) -> None:
    code = 1
    try:
        os.setsid()
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        prepare()
        service = open_service(state, url, options)
        config = uvicorn.Config(
            make_app(service),
            http=BoundedProtocol,
            log_config=None,
            access_log=False,
            ws="none",
            timeout_graceful_shutdown=2,
        )
        run(config, [listening])
        code = 0
    except BaseException as reason:  # noqa: BLE001 - the fork must not go on as the benchmark
        print(f"{type(reason).__name__}: {reason}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)
