"""100 clients at once, and 1,000 searches: what a status read takes, and that each search is run once.

    python -m benchmarks.service_load [--keep]
    python -m benchmarks.service_load --clients 50 --searches 100 --streams 1500 --half-open 1300 [--keep]

The server is a process of its own, the clients are another; drivers take no time, so that all searches end. Each client
submits its searches under keys, every one twice, then reads states in turn: without a pause at first, then at
``--pause`` until all have ended. Bars: none lost, none run twice, p95 of a read under 100 ms, memory flat from the
burst's end on: at its beginning the server has neither its threads nor their connections. A connection that the server
closes, as it may one that was silent for 5 s, is made again, and what was asked is asked again: the row counts these.

With ``--streams`` and ``--half-open`` a crowd is there, in a third process: one token asks for so many event streams at
once, refused ones again after the 5 s that it is told; and so many connections send half a head, each made again 5 s
after it was closed. The bar is 200 ms then, for the others.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from autotune.service.client import Client
from autotune.service.service import open_database
from autotune.service.store.tokens import Tokens

from .rows import save_rows
from .service_place import Server

BAR_MS, CROWDED_BAR_MS, MOST_GROWTH = 100.0, 200.0, 0.10
TRIALS = 3
_MOST_TRIES = 3


def main() -> None:
    """Run it, and print the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--searches", type=int, default=1000)
    parser.add_argument("--burst", type=float, default=10.0, help="seconds of reads without a pause")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two reads of a client, later")
    parser.add_argument("--streams", type=int, default=0, help="event streams that one token asks for at once")
    parser.add_argument("--half-open", type=int, default=0, help="connections that send half a head")
    parser.add_argument("--keep", action="store_true", help="add the row to benchmarks/results/service-load-cpu.jsonl")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="autotune-load-", ignore_cleanup_errors=True) as folder:
        row = _measure(Path(folder), arguments)
    print(json.dumps(row, indent=2))
    _print_times(f"{arguments.clients} clients that never pause", "burst", row)
    _print_times(f"{arguments.clients} clients, {1 / arguments.pause:g} reads a second each", "calm", row)
    if arguments.keep:
        print(save_rows("service-load", "cpu", [row]))
    sys.exit(not row["holds"])


def _print_times(who: str, phase: str, row: dict[str, Any]) -> None:
    times = (f"{name} {row[f'{phase}_{name}_ms']:.1f} ms" for name in ("p50", "p95", "max"))
    bar = "within" if row[f"{phase}_p95_ms"] < row["bar_ms"] else "over"
    print(f"{who}: {row[f'{phase}_reads']} reads, {', '.join(times)}; p95 is {bar} {row['bar_ms']:.0f} ms")


def _measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    state, job = folder / "state", folder / "job"
    job.mkdir()
    (job / "model.py").write_text(json.dumps({"trials": TRIALS, "seconds": 0.0}))
    database, _ = open_database(state, None, alone=False)
    token, crowds = (Tokens(database).create(name, "admin", 3600.0)[1] for name in ("load", "crowd"))
    database.close()  # SQLite's locks are not to be had across a fork
    server = Server(state, token=token)
    try:
        archive = server.client.put_folder(job)
        for _ in range(200):
            list(server.client.searches())
        crowd = _Crowd(server, crowds, folder, arguments.streams, arguments.half_open)
        before, cpu_before = server.resident_bytes(), server.cpu_s()
        clients = Clients(server, token, archive)
        gc.freeze()  # else a read would be charged for the garbage of this process, too
        began = time.monotonic()
        asyncio.run(clients.run(arguments.clients, arguments.searches, arguments.burst, arguments.pause))
        took = time.monotonic() - began
        after, cpu = server.resident_bytes(), server.cpu_s() - cpu_before
        crowd.end()
        searches = [each for each in server.client.searches() if each["owner"] == "load"]
    except RuntimeError:
        print(server.log.read_text()[-2000:], file=sys.stderr)
        raise
    finally:
        server.end()
    proofs = Counter(path.read_text() for path in state.glob("searches/*/proof"))
    ended = Counter(search["state"] for search in searches)
    once = proofs["".join(f"{n}\n" for n in range(TRIALS))]
    burst, calm = _percentiles(clients.burst_ms), _percentiles(clients.calm_ms)
    bar_ms = CROWDED_BAR_MS if arguments.streams or arguments.half_open else BAR_MS
    exact = clients.failed == 0 and ended == {"SUCCEEDED": arguments.searches} and once == arguments.searches
    return {
        "clients": arguments.clients,
        "searches": arguments.searches,
        "streams": arguments.streams,
        "half_open": arguments.half_open,
        **crowd.counts(),
        "bar_ms": bar_ms,
        "submits": clients.submits,
        "failed_requests": clients.failed,
        "connections_made_again": clients.made_again,
        "ended": dict(ended),
        "run_once": once,
        "burst_reads": len(clients.burst_ms),
        "burst_s": arguments.burst,
        **{f"burst_{name}_ms": value for name, value in burst.items()},
        "burst_cpu_ms_a_read": round(1000 * clients.burst_cpu_s / len(clients.burst_ms), 2),
        "burst_server_cpu_s": round(clients.burst_cpu_s, 1),
        "burst_server_waits_s": round(clients.burst_wait_s, 1),
        "calm_reads": len(clients.calm_ms),
        **{f"calm_{name}_ms": value for name, value in calm.items()},
        "pause_s": arguments.pause,
        "mib_before": round(before / 2**20),
        "mib_after_burst": round(clients.burst_bytes / 2**20),
        "mib_after": round(after / 2**20),
        "server_cpu_s": round(cpu, 1),
        "seconds": round(took, 1),
        "load_average": round(os.getloadavg()[0], 1),
        "holds": exact and max(burst["p95"], calm["p95"]) < bar_ms and after < clients.burst_bytes * (1 + MOST_GROWTH),
    }


_AGAIN_S = 5.0
_CROWD = ("streams_open", "streams_refused", "half_open_closed", "crowd_errors")


class _Crowd:
    """Streams of one token, and connections without one, in a process of their own until :meth:`end`."""

    def __init__(self, server: Server, token: str, folder: Path, num_streams: int, num_half_open: int) -> None:
        self._counts = multiprocessing.get_context("fork").Array("q", len(_CROWD))
        self._process: Any = None
        if not num_streams + num_half_open:
            return
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        (job := folder / "followed").mkdir()
        (job / "model.py").write_text(json.dumps({"trials": 1, "holds_at": "reference"}))
        with Client(server.url, token) as client:
            search = client.submit(job, task="model.py", priority=100)["id"]
        self._go = folder / "state" / "searches" / search / "go"
        stream = f"GET /v1/searches/{search}/events HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n"
        asked = {
            f"{stream}Authorization: Bearer {token}\r\n\r\n": num_streams,
            "GET /v1/searches HTTP/1.1\r\n": num_half_open,
        }
        self._process = multiprocessing.get_context("fork").Process(
            target=self._run, args=(server.port, asked), daemon=True
        )
        self._process.start()
        time.sleep(2 * _AGAIN_S)  # all have come

    def _run(self, port: int, asked: dict[str, int]) -> None:
        async def go() -> None:
            each = [self._ask(port, text.encode()) for text, number in asked.items() for _ in range(number)]
            await asyncio.gather(*each)

        asyncio.run(go())

    async def _ask(self, port: int, text: bytes) -> None:
        """One after the other, each for as long as it is kept."""
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(text)
                head = await reader.read(2**12)
                is_open = head.startswith(b"HTTP/1.1 200")
                self._counts[_CROWD.index("streams_open")] += is_open
                self._counts[_CROWD.index("streams_refused")] += head.startswith(b"HTTP/1.1 429")
                self._counts[_CROWD.index("half_open_closed")] += not head
                while is_open and await reader.read(2**16):
                    pass
                self._counts[_CROWD.index("streams_open")] -= is_open
                writer.close()
            except OSError:
                self._counts[_CROWD.index("crowd_errors")] += 1
            await asyncio.sleep(_AGAIN_S)

    def counts(self) -> dict[str, int]:
        """What came of them so far."""
        return dict(zip(_CROWD, self._counts, strict=True)) if self._process else {}

    def end(self) -> None:
        """All of them are gone."""
        if self._process:
            self._process.kill()
            self._process.join()
            self._go.touch()


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [math.inf]
    ranks = {f"p{p}": ordered[min(int(len(ordered) * p / 100), len(ordered) - 1)] for p in (50, 95, 99)}
    return {name: round(value, 1) for name, value in {**ranks, "max": ordered[-1]}.items()}


class Connection:
    """One that is kept open."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of the answer."""
        self._streams = self._streams or await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = int(head.partition("content-length:")[2].partition("\r\n")[0])
        return int(head[9:12]), await reader.readexactly(length)

    def close(self) -> None:
        """The next request opens it again."""
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None


class Clients:
    """Connections that are kept open, with as little work for each request as there can be."""

    def __init__(self, server: Server, token: str, archive: str) -> None:
        self._server, self._archive = server, archive
        self._head = f"HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
        self.burst_ms: list[float] = []
        self.calm_ms: list[float] = []
        self.submits = self.failed = self.made_again = 0
        self.burst_cpu_s = self.burst_wait_s = 0.0
        """Of the server, while reads have no pause: on a processor, and ready to run while others had them; with what
        it does for searches that run meanwhile."""
        self.burst_bytes = 0
        """Resident, at the burst's end: each thread that answers has its connection to the database by then."""

    async def run(self, num_clients: int, num_searches: int, burst_s: float, pause_s: float) -> None:
        """Until every search has ended, and for as long without pauses as with them."""
        self._gate = asyncio.Barrier(num_clients)
        await asyncio.gather(
            *(self._client(n, range(n, num_searches, num_clients), burst_s, pause_s) for n in range(num_clients))
        )

    async def _client(self, name: int, numbers: range, burst_s: float, pause_s: float) -> None:
        connection = Connection(self._server.port)
        ids = []
        for number in numbers:
            spec = {"task": "model.py", "archive": self._archive, "name": f"n{number}"}
            first, again = [await self._submit(connection, spec, f"k{number}") for _ in range(2)]
            self.failed += first != again
            ids.append(first)
        await self._gate.wait()
        until, cpu_s, wait_s = time.monotonic() + burst_s, self._server.cpu_s(), self._server.wait_s()
        while time.monotonic() < until:
            await self._read(connection, ids[len(self.burst_ms) % len(ids)], self.burst_ms)
        if name == 0:
            self.burst_cpu_s, self.burst_wait_s = self._server.cpu_s() - cpu_s, self._server.wait_s() - wait_s
            self.burst_bytes = self._server.resident_bytes()
        open_ids, until = list(ids), time.monotonic() + burst_s
        while open_ids or time.monotonic() < until:
            await asyncio.sleep(pause_s)
            state = await self._read(connection, (open_ids or ids)[0], self.calm_ms)
            if open_ids and state not in ("QUEUED", "LEASED", "RUNNING"):
                del open_ids[0]
        connection.close()

    async def _submit(self, connection: Connection, spec: dict[str, str], key: str) -> str:
        status, body = await self._ask(connection, "POST /v1/searches", json.dumps(spec).encode(), key)
        self.submits += 1
        self.failed += status not in (200, 201)
        if status not in (200, 201):
            raise RuntimeError(f"a submit was answered with {status}: {body!r}")
        return str(json.loads(body)["id"])

    async def _read(self, connection: Connection, search_id: str, times_ms: list[float]) -> str:
        began = time.perf_counter()
        status, body = await self._ask(connection, f"GET /v1/searches/{search_id}")
        times_ms.append((time.perf_counter() - began) * 1000)
        self.failed += status != 200
        return str(json.loads(body)["state"])

    async def _ask(self, connection: Connection, what: str, body: bytes = b"", key: str = "") -> tuple[int, bytes]:
        more = f"Content-Type: application/json\r\nIdempotency-Key: {key}\r\n" if key else ""
        request = f"{what} {self._head}{more}Content-Length: {len(body)}\r\n\r\n".encode() + body
        for _ in range(_MOST_TRIES):
            try:
                return await connection.ask(request)
            except (ConnectionError, asyncio.IncompleteReadError):  # a read changes nothing, and a submit has its key
                connection.close()
                self.made_again += 1
        raise RuntimeError(f"the server closed {_MOST_TRIES} connections without an answer to {what}")


if __name__ == "__main__":
    main()
