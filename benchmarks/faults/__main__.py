"""Some five hundred faults, each done to the real command line and looked at from outside.

    python -m benchmarks.faults [--kind KIND]... [--only NAME]... [--executor local]... [--lanes 3] [--keep LABEL]

Each has folders, a ``/tmp`` and a ``/dev/shm`` of its own. Looked at are the exit code (docs/use/commands.md), one
clear message without a traceback or a raw escape character, stored rows that are the same as before, nothing measured
twice, no outcome of an environment's failure, and no process and no file that is left. Exits with 1 where one failed.
What is told as undefended is counted apart, with its reason. ``--keep`` adds a row for each kind, with what failed, to
results/faults-cpu.jsonl.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.apart import may_mount

from ..rows import save_rows
from . import databases, disks, kills, options, plans, spaces, streams, studies, tasks
from .core import Fault, Result
from .lanes import run
from .place import ROOT
from .scene import make_template

KINDS = (plans, spaces, options, studies, databases, kills, disks, tasks, streams)


def main() -> None:
    """Try the faults that are asked for, print the table, keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", help="may be given again; default: all")
    parser.add_argument("--only", action="append", metavar="NAME", help="a part of a fault's name")
    parser.add_argument("--executor", choices=("none", "local", "ray"), action="append", help="default: all")
    parser.add_argument("--lanes", type=int, default=3, help="faults at once: two processors are busy with three")
    parser.add_argument("--keep", metavar="LABEL", help="add the table to benchmarks/results, under this label")
    parser.add_argument("--list", action="store_true", help="name the faults, and try none")
    arguments = parser.parse_args()
    _have_own_mounts()
    faults = [fault for module in KINDS for fault in module.faults() if _is_asked(fault, arguments)]
    if arguments.list:
        print("\n".join(f"{fault.kind:10} {fault.executor:6} {fault.name}" for fault in faults))
        return
    began_s = time.monotonic()
    results = _try(faults, arguments.lanes)
    rows = [_row(kind, results) for kind in dict.fromkeys(fault.kind for fault in faults)]
    _print(rows, results, time.monotonic() - began_s)
    if arguments.keep:
        told = {"label": arguments.keep, "commit": _commit(), "lanes": arguments.lanes}
        print(save_rows("faults", "cpu", [{**told, **row} for row in rows]))
    sys.exit(any(row["failed"] for row in rows))


def _try(faults: Sequence[Fault], num_lanes: int) -> list[tuple[Fault, Result]]:
    results = []
    template = Path(tempfile.mkdtemp(prefix="autotune-faults-template-", dir="/var/tmp"))
    try:
        make_template(template)
        for fault, result in run(faults, num_lanes, template):
            results.append((fault, result))
            state = f"[{len(results)}/{len(faults)}] {fault.kind}: {fault.name} ({fault.executor})"
            print(f"{state}: {result.status}, {result.seconds:.1f} s", file=sys.stderr)
            if result.status == "failed":
                print(f"    {result.got[:600]}", file=sys.stderr)
    finally:
        shutil.rmtree(template, ignore_errors=True)
    return results


def _row(kind: str, results: Sequence[tuple[Fault, Result]]) -> dict[str, Any]:
    mine = [(fault, result) for fault, result in results if fault.kind == kind]
    counts = {name: sum(result.status == name for _, result in mine) for name in ("held", "failed", "undefended")}
    by_executor = {
        executor: sum(fault.executor == executor for fault, _ in mine) for executor in ("none", "local", "ray")
    }
    told = [
        {"name": f"{fault.name} ({fault.executor})", "expected": result.expected, "got": result.got[:300]}
        for fault, result in mine
        if result.status != "held"
    ]
    seconds = round(sum(result.seconds for _, result in mine))
    return {"kind": kind, "n": len(mine), **counts, "by_executor": by_executor, "seconds": seconds, "told": told}


def _print(rows: Sequence[dict[str, Any]], results: Sequence[tuple[Fault, Result]], seconds: float) -> None:
    columns = ("n", "held", "failed", "undefended", "seconds")
    print(f"{'kind':10}" + "".join(f"{name:>12}" for name in columns))
    for row in [*rows, {"kind": "all", **{name: sum(row[name] for row in rows) for name in columns}}]:
        print(f"{row['kind']:10}" + "".join(f"{row[name]:>12}" for name in columns))
    print(f"{seconds:.0f} s of wall clock")
    for status in ("failed", "undefended"):
        for fault, result in results:
            if result.status == status:
                print(f"\n{status}: {fault.kind}: {fault.name} ({fault.executor})")
                print(f"  expected: {result.expected}\n  got: {result.got[:600]}")


def _commit() -> str:
    """Of the code that was tried."""
    command = ["git", "log", "-1", "--format=%h", "--", "autotune", "workers", "search_spaces"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _is_asked(fault: Fault, arguments: argparse.Namespace) -> bool:
    return (
        (not arguments.kind or fault.kind in arguments.kind)
        and (not arguments.executor or fault.executor in arguments.executor)
        and (not arguments.only or any(part in fault.name for part in arguments.only))
    )


def _have_own_mounts() -> None:
    """Go on in a mount namespace of our own, so that no disk that a fault mounts is ever seen by anybody else."""
    if may_mount() and "AUTOTUNE_FAULTS_APART" not in os.environ:
        os.environ["AUTOTUNE_FAULTS_APART"] = "1"
        again = [sys.executable, "-m", "benchmarks.faults", *sys.argv[1:]]
        os.execvp("unshare", ["unshare", "--mount", "--propagation", "private", *again])


if __name__ == "__main__":
    main()
