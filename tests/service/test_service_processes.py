"""Servers that are processes: killed, stopped and woken, one too many, and with clients that do not read."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from service_runs import DRIVER, bearer

from autotune.service.client import Client
from autotune.service.store.database import Database
from autotune.service.store.leases import Leases
from autotune.workers.process import ProcessId, identify, with_variable


class Server:
    """``autotune serve`` in a process of its own, with the driver that takes no time."""

    def __init__(self, state: Path, lease_s: float = 5.0) -> None:
        self.log = state.parent / "server.log"
        code = (
            "import sys, uvicorn\n"
            "from autotune.service.web.app import make_app\n"
            "from autotune.service.supervisor import RunnerOptions\n"
            "from autotune.service.service import open_service\n"
            "from pathlib import Path\n"
            f"options = RunnerOptions(num_searches=2, lease_s={lease_s}, beat_s=0.05, program={DRIVER!r})\n"
            f"service = open_service(Path({str(state)!r}), None, options)\n"
            "import socket\n"
            "listening = socket.create_server(('127.0.0.1', 0))\n"
            "print(listening.getsockname()[1], service.tokens.make_for_run(), flush=True)\n"
            "uvicorn.Server(uvicorn.Config(make_app(service), log_level='error')).run([listening])\n"
        )
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=log, text=True)
        port, _, self.token = self.process.stdout.readline().strip().partition(" ")
        assert port, self.log.read_text()
        self.port = int(port)
        self.url = f"http://127.0.0.1:{port}"
        self.client = Client(self.url, self.token)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def job(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    return folder


def until(is_so, timeout_s=600.0):
    ends = time.monotonic() + timeout_s
    while not (found := is_so()):
        assert time.monotonic() < ends
        time.sleep(0.05)
    return found


def measured(state, search_id):
    return (state / "searches" / search_id / "proof").read_text().split()


@pytest.mark.slow
def test_a_killed_server_and_its_orphaned_driver_lose_nothing(tmp_path, job):
    """SIGKILL of the server: the driver lives on; the next server ends it, reads what it said, and goes on."""
    (job / "model.py").write_text('{"trials": 30, "seconds": 0.1, "holds_at": "finalists"}')
    server = Server(tmp_path / "state")
    try:
        search_id = server.client.submit(job, task="model.py")["id"]
        until(lambda: list(server.client.trials(search_id)))
        server.kill()
        mark = f"AUTOTUNE_SERVICE_SEARCH={search_id}"
        until((tmp_path / "state" / "searches" / search_id / "held").exists)
        assert with_variable(mark)
        server = Server(tmp_path / "state")
        search = server.client.wait(search_id)
        assert (search["state"], search["attempt"]) == ("SUCCEEDED", 2)
        assert measured(tmp_path / "state", search_id) == [*map(str, range(30))]
        assert [trial["number"] for trial in server.client.trials(search_id)] == [*range(30)]
        assert [event["seq"] for event in server.client.events(search_id)] == [*range(1, search["num_events"] + 1)]
        assert with_variable(mark) == []
    finally:
        server.kill()


@pytest.mark.medium
def test_a_server_that_is_woken_too_late_leaves_its_successors_driver_alone(tmp_path, job):
    """SIGSTOP past its lease, another server on the same files, SIGCONT: the first drops what it had, and the second's
    driver is the very process that ends the search."""
    state = tmp_path / "state"
    (job / "model.py").write_text('{"trials": 4, "holds_at": "trial"}')
    first = Server(state, lease_s=30.0)
    second = None
    try:
        search_id = first.client.submit(job, task="model.py")["id"]
        held = state / "searches" / search_id / "held"
        until(held.exists)
        until(lambda: list(first.client.trials(search_id)))
        stop(first, state)
        held.unlink()  # so that the next driver waits there, too
        for lock in state.glob("*lock"):  # as on a disk that knows no locks
            lock.unlink()
        second = Server(state, lease_s=30.0)
        lease = until(lambda: held_by_driver(state, attempt=2))
        driver = ProcessId(lease.pid, lease.pid_start)
        until(held.exists)
        first.process.send_signal(signal.SIGCONT)
        until(lambda: "somebody else has it now" in first.log.read_text())
        until(lambda: "\nautotune_drivers 0.0\n" in httpx.get(f"{first.url}/metrics", headers=bearer(first.token)).text)
        assert identify(driver.pid) == driver
        held.with_name("go").touch()
        search = second.client.wait(search_id)
        assert (search["state"], search["attempt"]) == ("SUCCEEDED", 2)
        assert measured(state, search_id) == [*map(str, range(4))]
        assert [trial["number"] for trial in second.client.trials(search_id)] == [*range(4)]
        assert with_variable(f"AUTOTUNE_SERVICE_SEARCH={search_id}") == []
    finally:
        first.kill()
        if second is not None:
            second.kill()


def stop(server, state):
    """SIGSTOP, and not in a transaction: who holds SQLite's lock then keeps it from everybody."""
    database = Database(f"sqlite:///{state}/service.db")
    with database.writing():
        server.process.send_signal(signal.SIGSTOP)
        os.waitpid(server.process.pid, os.WUNTRACED)
    database.close()


def held_by_driver(state, attempt):
    """The lease of a search whose driver runs, at this attempt."""
    database = Database(f"sqlite:///{state}/service.db")
    leases = Leases(database, (state / "home").read_text(), 1.0).expired(all_held=True)
    database.close()
    return next((lease for lease in leases if lease.attempt == attempt and lease.pid), None)


@pytest.mark.slow
def test_clients_that_never_read_keep_nobody_waiting(tmp_path, job):
    """20 streams of 5,000 events each, of which nothing is read: others are answered, the search ends, and the server's
    memory is as it was."""
    server = Server(tmp_path / "state")
    silent = []
    try:
        (job / "model.py").write_text('{"trials": 2500, "seconds": 0.0}')
        search_id = server.client.submit(job, task="model.py")["id"]
        until(lambda: len(list(server.client.events(search_id, after=0))) > 5000)
        before = resident_bytes(server.process.pid)
        for _ in range(20):
            silent.append(socket.create_connection(("127.0.0.1", server.port)))
            silent[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            silent[-1].sendall(
                f"GET /v1/searches/{search_id}/events HTTP/1.1\r\nHost: localhost\r\n"
                f"Authorization: Bearer {server.token}\r\nAccept: text/event-stream\r\n\r\n".encode()
            )
        (job / "model.py").write_text('{"trials": 3}')
        other = server.client.submit(job, task="model.py")["id"]
        assert server.client.wait(other)["state"] == "SUCCEEDED"
        assert resident_bytes(server.process.pid) - before < 20 * 2 * 2**20  # of 20 streams of 2.5 MB
    finally:
        for each in silent:
            each.close()
        server.kill()


def resident_bytes(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
