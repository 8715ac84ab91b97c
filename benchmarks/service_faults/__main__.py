"""Faults done to the service while a search is at each of its states, looked at from outside; and races for leases.

    python -m benchmarks.service_faults [--kinds KIND...] [--only NAME]... [--at POINT]... [--races 1000] [--keep]

The driver takes no time, and holds where it is told to; then the fault is done, what was broken is healed, and the
search let go. Faults of ``trials``, ``machines`` and ``nodes`` are done to a real search, while it measures: on this
machine, and over two Ray nodes. Held against: every search that was accepted ends, as it should; nothing is measured
twice or lost, or told twice; events have no gaps, and follow the table of states; there is a plan exactly where there
is one; no process is left; no token is printed. In a race, exactly one has the search. Not tried here: GPUs, a cut
between two machines, and most of what a trial's own code may do (``benchmarks.faults`` does).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from autotune.service.store.database import Database
from tests.apart import may_mount
from tests.postgresql import Cluster, missing

from ..rows import save_rows
from . import databases, disks, drivers, machines, memory, nodes, requests, servers, trials
from .core import Fault, attempt
from .races import race
from .scene import POINTS, make_template

_MODULES = (servers, drivers, databases, disks, requests, trials, machines, nodes)
KINDS = {module.__name__.rpartition(".")[2]: module.FAULTS for module in _MODULES}


def main() -> None:
    """Do them, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, "races"], default=[*KINDS, "races"])
    parser.add_argument("--only", action="append", metavar="NAME", help="a part of a fault's name")
    parser.add_argument("--at", action="append", choices=POINTS)
    parser.add_argument("--races", type=int, default=1000, help="of each database")
    parser.add_argument("--lanes", type=int, default=2, help="faults at once")
    parser.add_argument("--most-time", type=float, default=1200.0, help="seconds; what is left then is not tried")
    parser.add_argument("--keep", action="store_true", help="add rows to benchmarks/results/service-faults-cpu.jsonl")
    arguments = parser.parse_args()
    _have_own_mounts()
    began = time.monotonic()
    why_not, no_limit = missing(), memory.missing()
    chosen = [
        (kind, fault, point)
        for kind in KINDS
        if kind in arguments.kinds
        for fault in KINDS[kind]
        for point in fault.points
        if (not arguments.only or any(part in fault.name for part in arguments.only))
        and (not arguments.at or point in arguments.at)
        and not (fault.on_postgresql and why_not)
        and not (fault.with_limit and no_limit)
    ]
    rows = _in_lanes(chosen, arguments.lanes, began + arguments.most_time)
    if "races" in arguments.kinds:
        rows += _race(arguments.races, with_postgresql=why_not is None)
    if why_not:
        print(f"without PostgreSQL: {why_not}")
    if no_limit:
        print(f"without limits on memory: {no_limit}")
    for row in rows:
        print(f"{row['kind']:10}{row['fault']:44}{row['held']:5} held{len(row['failed']):5} failed")
    seconds = time.monotonic() - began
    injected = [row for row in rows if row["kind"] != "races"]
    tried = sum(row["held"] + len(row["failed"]) for row in injected)
    print(f"{sum(row['held'] for row in injected)} of {tried} held, {len(chosen) - tried} not tried, {seconds:.0f} s")
    if arguments.keep:
        print(save_rows("service-faults", "cpu", [{**row, "all_seconds": round(seconds)} for row in rows]))
    sys.exit(any(row["failed"] for row in rows))


def _race(count: int, *, with_postgresql: bool) -> list[dict[str, Any]]:
    rows = []
    with ExitStack() as stack:
        urls = {"SQLite": f"sqlite:///{stack.enter_context(tempfile.TemporaryDirectory())}/service.db"}
        if with_postgresql:
            urls["PostgreSQL"] = stack.enter_context(Cluster()).url()
        for name, url in urls.items():
            database = Database(url)
            database.migrate()
            database.close()
            broken = race(url, count)
            print("\n".join(broken[:20]))
            rows.append({"kind": "races", "fault": name, "held": count - len(broken), "failed": broken[:20]})
    return rows


Chosen = Sequence[tuple[str, Fault, str]]


def _in_lanes(chosen: Chosen, num_lanes: int, until: float) -> list[dict[str, Any]]:
    """The table: lanes are processes of one thread, each with a disk and a PostgreSQL server of its own."""
    context = multiprocessing.get_context("fork")
    upcoming, results = context.Value("i", 0), context.SimpleQueue()
    lanes = [context.Process(target=_lane, args=(chosen, upcoming, results, until)) for _ in range(num_lanes)]
    for lane in lanes:
        lane.start()
    rows = {fault.name: {"kind": kind, "fault": fault.name, "held": 0, "failed": []} for kind, fault, _ in chosen}
    open_lanes = num_lanes
    while open_lanes:
        if (result := results.get()) is None:
            open_lanes -= 1
            continue
        number, complaint, seconds = result
        _, fault, point = chosen[number]
        row: dict[str, Any] = rows[fault.name]
        if complaint is None:
            row["held"] += 1
        else:
            row["failed"].append(f"{point}: {complaint}")
        print(f"[{number + 1}/{len(chosen)}] {fault.name}, {point}: {complaint or 'held'}, {seconds:.1f} s", flush=True)
    for lane in lanes:
        lane.join()
    return list(rows.values())


def _lane(chosen: Chosen, upcoming: Any, results: Any, until: float) -> None:
    try:
        with ExitStack() as stack:
            place = stack.enter_context(_disk())
            templates = {False: make_template(place / "template")}
            while time.monotonic() < until:
                with upcoming.get_lock():
                    number = upcoming.value
                    upcoming.value += 1
                if number >= len(chosen):
                    break
                _, fault, point = chosen[number]
                if fault.on_postgresql and True not in templates:
                    templates[True] = make_template(place / "postgresql", stack.enter_context(Cluster()))
                began = time.monotonic()
                complaint = attempt(fault, point, place / str(number), templates[fault.on_postgresql])
                results.put((number, complaint, time.monotonic() - began))
    finally:
        results.put(None)


@contextmanager
def _disk() -> Iterator[Path]:
    """A small disk, which may be filled."""
    path = Path(tempfile.mkdtemp(prefix="autotune-service-faults-"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=False)
        shutil.rmtree(path, ignore_errors=True)


def _have_own_mounts() -> None:
    """Go on in a mount namespace of our own: no disk of ours is ever seen by anybody else."""
    if not may_mount():
        raise SystemExit("a disk of its own could not be mounted: run it as root")
    if "AUTOTUNE_FAULTS_APART" not in os.environ:
        os.environ["AUTOTUNE_FAULTS_APART"] = "1"
        again = [sys.executable, "-m", "benchmarks.service_faults", *sys.argv[1:]]
        os.execvp("unshare", ["unshare", "--mount", "--propagation", "private", *again])


if __name__ == "__main__":
    main()
