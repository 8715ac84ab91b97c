"""Faults done to the service while a search is at each of its states, and looked at from outside.

    python -m benchmarks.service_faults [--only NAME]... [--at STATE]... [--keep]

The driver takes no time, and holds where it is told to; then the fault is done, what was broken is healed, and the
search let go. Held against: every search that was accepted ends, as it should; nothing is measured twice or lost;
events have no gaps, and follow the table of states; there is a plan exactly where there is one; no process is left; no
token is printed. Not tried here: another clock, GPUs, Ray's nodes, a cut between two machines.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from autotune.service.documents import Documents
from autotune.service.spec import SearchSpec
from autotune.service.store.database import Database
from autotune.service.store.leases import Lease, Leases, Stale
from autotune.service.store.states import State

from .rows import save_rows
from .service_scene import LEASE_S, POINTS, Scene, make_template, scene

Injection = Callable[[Scene], None]
RUNS = tuple(point for point in POINTS if point != "queued")


@dataclass(frozen=True)
class Fault:
    """What is done."""

    name: str
    do: Injection
    points: tuple[str, ...] = POINTS
    ends: tuple[State, ...] = (State.SUCCEEDED,)


def _pid(the: Scene) -> int:
    return int(the.row(the.blocker or the.search_id)["pid"])


def kill_server(the: Scene) -> None:
    """SIGKILL; its driver goes on alone."""
    the.server.end(signal.SIGKILL)
    the.restart()
    the.go()


def kill_server_twice(the: Scene) -> None:
    """The next is killed as it takes over."""
    the.server.end(signal.SIGKILL)
    the.restart()
    time.sleep(0.1)
    kill_server(the)


def let_orphan_end(the: Scene) -> None:
    """The driver goes on, and ends, while there is no server."""
    the.server.end(signal.SIGKILL)
    the.go()
    time.sleep(0.7)
    the.restart()


def end_server(the: Scene) -> None:
    """SIGTERM."""
    the.server.end(signal.SIGTERM)
    the.restart()
    the.go()


def end_server_twice(the: Scene) -> None:
    """SIGTERM, and again."""
    the.server.send(signal.SIGTERM, signal.SIGTERM)
    end_server(the)


def pause_server(the: Scene) -> None:
    """SIGSTOP past its lease."""
    the.server.send(signal.SIGSTOP)
    the.go()
    time.sleep(LEASE_S + 0.3)
    the.server.send(signal.SIGCONT)


def replace_server(the: Scene) -> None:
    """SIGSTOP past its lease; another takes over, and the first comes back."""
    first = the.server
    first.send(signal.SIGSTOP)
    time.sleep(LEASE_S + 0.1)
    (the.state / "lock").unlink()
    the.restart()
    the.others.append(first)
    watched = the.blocker or the.search_id
    the.until(lambda: the.row(watched)["attempt"] >= 2 or the.row(watched)["ended_at"], "the second server")
    first.send(signal.SIGCONT)
    time.sleep(0.3)
    the.go()


def kill_driver(the: Scene) -> None:
    """SIGKILL of the driver."""
    os.kill(_pid(the), signal.SIGKILL)
    the.go()


def pause_driver(the: Scene) -> None:
    """SIGSTOP of the driver past the lease."""
    pid = _pid(the)
    os.kill(pid, signal.SIGSTOP)
    the.go()
    time.sleep(LEASE_S + 0.2)
    os.kill(pid, signal.SIGCONT)


def kill_both(the: Scene) -> None:
    """SIGKILL of the driver and the server."""
    pid = _pid(the)
    the.server.end(signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    the.restart()
    the.go()


def lock_database(the: Scene) -> None:
    """SQLite's write lock is held past the lease."""
    with closing(sqlite3.connect(the.state / "service.db", isolation_level=None, timeout=30)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        the.go()
        time.sleep(LEASE_S + 0.5)
        connection.execute("ROLLBACK")


def fill_disk(the: Scene) -> None:
    """No room on the state folder, then room again."""
    fill = the.state / "fill"
    with suppress(OSError), fill.open("wb", buffering=0) as file:
        while file.write(bytes(2**16)):
            pass
    time.sleep(0.7)
    fill.unlink()
    time.sleep(0.2)
    the.go()


def cancel_finish(the: Scene) -> None:
    """Cancelled, with the best so far."""
    the.server.client.cancel(the.search_id)
    the.go()


def cancel_now(the: Scene) -> None:
    """Cancelled at once."""
    the.server.client.cancel(the.search_id, "now")
    the.go()


def cancel_race(the: Scene) -> None:
    """Ten cancels that race with the end."""
    the.go()
    for _ in range(10):
        the.server.client.cancel(the.search_id)


def cancel_then_kill(the: Scene) -> None:
    """Cancelled, and the server is killed."""
    the.server.client.cancel(the.search_id)
    kill_server(the)


def write_late(the: Scene) -> None:
    """Whatever may be written under a lease, under one that is somebody else's."""
    database = Database(f"sqlite:///{the.state}/service.db")
    before = tuple(the.row(the.search_id))
    leases, now = Leases(database, (the.state / "home").read_text(), LEASE_S), time.time()
    spec = SearchSpec(task="model.py", folder="/x")
    old = Lease(the.search_id, "0" * 32, spec, 1, 0, None, {}, None, None)
    row = {"event": "trial_ended", "number": int(now), "outcome": "measured"}
    late: tuple[Callable[[], object], ...] = (
        lambda: leases.keep(old),
        lambda: leases.begin(old, 1, 1),
        lambda: leases.record(old, [row], 10, {}),
        lambda: leases.finish(old, State.SUCCEEDED, "", Documents("no plan")),
        lambda: leases.finish(old, State.ERROR, "late"),
        lambda: leases.give_back(old, "late", is_failure=True),
    )
    for write in late:
        with pytest.raises(Stale):
            write()
    database.close()
    after = the.row(the.search_id)
    changed = {key for key, was in zip(after.keys(), before, strict=True) if after[key] != was}
    assert changed <= {"lease_expires_at"}, changed
    the.go()


ANY_END = (State.SUCCEEDED, State.CANCELLED)
FAULTS = (
    Fault("server killed", kill_server),
    Fault("server killed twice", kill_server_twice),
    Fault("server killed, driver ends alone", let_orphan_end),
    Fault("server told to end", end_server),
    Fault("server told to end twice", end_server_twice),
    Fault("server stopped past its lease", pause_server),
    Fault("server replaced while stopped", replace_server),
    Fault("driver killed", kill_driver),
    Fault("driver stopped past the lease", pause_driver),
    Fault("driver and server killed", kill_both),
    Fault("database locked past the lease", lock_database),
    Fault("disk full", fill_disk),
    Fault("cancel finish", cancel_finish, ends=ANY_END),
    Fault("cancel now", cancel_now, ends=ANY_END),
    Fault("ten cancels race with the end", cancel_race, ends=ANY_END),
    Fault("cancelled, then server killed", cancel_then_kill, ends=ANY_END),
    Fault("writes under a stale token", write_late),
)


def main() -> None:
    """Do them, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="a part of a fault's name")
    parser.add_argument("--at", action="append", choices=POINTS)
    parser.add_argument("--most-time", type=float, default=900.0, help="seconds; what is left then is not tried")
    parser.add_argument("--keep", action="store_true", help="add rows to benchmarks/results/service-faults-cpu.jsonl")
    arguments = parser.parse_args()
    chosen = [
        (fault, point)
        for fault in FAULTS
        for point in fault.points
        if (not arguments.only or any(part in fault.name for part in arguments.only))
        and (not arguments.at or point in arguments.at)
    ]
    held, failed, began = Counter[str](), dict[str, list[str]](), time.monotonic()
    with _place() as place:
        token = make_template(place / "template")
        for number, (fault, point) in enumerate(chosen):
            if time.monotonic() - began > arguments.most_time:
                print(f"{len(chosen) - number} are left", flush=True)
                del chosen[number:]
                break
            complaint = _try(fault, point, place / str(number), place / "template", token)
            held[fault.name] += complaint is None
            if complaint is not None:
                failed.setdefault(fault.name, []).append(f"{point}: {complaint}")
            print(f"[{number + 1}/{len(chosen)}] {fault.name}, {point}: {complaint or 'held'}", flush=True)
    names = dict.fromkeys(fault.name for fault, _ in chosen)
    rows = [{"fault": name, "held": held[name], "failed": failed.get(name, [])} for name in names]
    for row in rows:
        print(f"{row['fault']:36}{row['held']:5} held{len(row['failed']):5} failed")  # type: ignore[arg-type]
    print(f"{sum(held.values())} of {len(chosen)} held, {time.monotonic() - began:.0f} s")
    if arguments.keep:
        print(save_rows("service-faults", "cpu", rows))
    sys.exit(bool(failed))


def _try(fault: Fault, point: str, folder: Path, template: Path, token: str) -> str | None:
    log = ""
    try:
        with scene(folder, template, token) as the:
            try:
                the.hold(point)
                fault.do(the)
                the.check(*fault.ends)
            except BaseException:
                log = the.server.log.read_text(errors="replace")[-1500:]
                raise
    except Exception as reason:  # noqa: BLE001 - each is told
        where = traceback.extract_tb(reason.__traceback__)[-1]
        print(log, file=sys.stderr)
        return f"{type(reason).__name__} at {where.name}:{where.lineno}: {str(reason)[:300]}"
    return None


class _place:
    """A small disk of its own, where it may be mounted."""

    def __enter__(self) -> Path:
        self.path = Path(tempfile.mkdtemp(prefix="autotune-service-faults-"))
        options = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(self.path)]
        if subprocess.run(options, capture_output=True).returncode:
            raise SystemExit("a tmpfs could not be mounted: run it as root, in a namespace of its own")
        return self.path

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "-l", str(self.path)], check=False)
        shutil.rmtree(self.path, ignore_errors=True)


if __name__ == "__main__":
    main()
