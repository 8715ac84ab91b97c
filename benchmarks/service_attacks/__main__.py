"""Attacks on a service, by kind: what each must not come to, and whether it held.

    python -m benchmarks.service_attacks [--kind KIND]... [--keep]

Five services are started as an admin does (``autotune serve``: as it is, ``--private``, ``--behind-proxy`` near and
far, for tasks that harm; a sixth with ``--run-as``, as root), with tokens of two who submit, a reader and an admin, one
that has expired and one that was revoked. Whatever is sent: no answer is a failure of the service (5xx), and after each
attack the victims' searches and all tokens are as they were. Bar: all held. What takes its time (heads and bodies that
do not come, tasks that run) goes on beside the others. Without root, ``--run-as`` is not tried; without Chromium, the
page is not; the table says so.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.chromium import missing

from ..rows import save_rows
from .callers import false_tokens, owners, roles
from .core import Attack, Scene, scene
from .inputs import archives, bodies, values
from .shown import page, shown
from .sites import hosts, other_sites
from .tasks import apart, submit_tasks, tasks, why_not
from .wire import floods, sizes, slow, smuggling

KINDS: dict[str, Callable[[], Iterator[Attack]]] = {
    "false tokens": false_tokens,
    "lesser roles": roles,
    "others' searches": owners,
    "other sites' pages": other_sites,
    "hosts, proxies": hosts,
    "SQL, paths, keys": values,
    "bodies": bodies,
    "smuggling": smuggling,
    "too large": sizes,
    "too slow": slow,
    "too many": floods,
    "archives": archives,
    "tasks": tasks,
    "log, metrics, secrets": shown,
    "the page": page,
    "tasks with --run-as": apart,
}
_BESIDE = ("too slow",)
"""In threads from the beginning on."""


def main() -> None:
    """Do them, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--keep", action="store_true", help="add rows to benchmarks/results/service-attacks-cpu.jsonl")
    arguments = parser.parse_args()
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # services end with it
    chosen = arguments.kind or [*KINDS]
    rows = []
    with scene() as the:
        if {"tasks", "the page"} & {*chosen}:
            submit_tasks(the)
        beside = {kind: [*KINDS[kind]()] for kind in chosen if kind in _BESIDE}
        with ThreadPoolExecutor(max(sum(map(len, beside.values())), 1)) as pool:
            waiting = {kind: [pool.submit(_try, the, each) for each in attacks] for kind, attacks in beside.items()}
            for kind in chosen:
                if kind not in _BESIDE:
                    rows.append(_row(kind, list(_each(the, kind))))
            rows += [
                _row(kind, [(each.name, said.result()) for each, said in zip(beside[kind], found, strict=True)])
                for kind, found in waiting.items()
            ]
    seconds = time.monotonic() - began
    for row in rows:
        for words in row["failed"]:
            print(f"NOT HELD  {row['kind']}: {words}")
    for row in rows:
        print(f"{row['kind']:24}{row['held']:6} of {row['of']}")
    held, of = sum(row["held"] for row in rows), sum(row["of"] for row in rows)
    print(f"{held} of {of} held, {seconds:.0f} s")
    if why := why_not():
        print(f"--run-as was not tried: {why}")
    if missing():
        print("the page was not tried: Chromium is not installed")
    if arguments.keep:
        print(save_rows("service-attacks", "cpu", [{**row, "all_seconds": round(seconds)} for row in rows]))
    sys.exit(held < of)


def _row(kind: str, tried: list[tuple[str, str | None]]) -> dict[str, Any]:
    failed = [f"{name}: {said}" for name, said in tried if said is not None]
    return {"kind": kind, "held": len(tried) - len(failed), "of": len(tried), "failed": failed}


def _each(the: Scene, kind: str) -> Iterator[tuple[str, str | None]]:
    """One after the other; victims and tokens are as they were after each."""
    services = ("main", "private") if kind == "others' searches" else ("main",)
    before = [the.facts(at) for at in services]
    began = time.monotonic()
    for attack in KINDS[kind]():
        said = _try(the, attack)
        if (after := [the.facts(at) for at in services]) != before:
            said, before = f"{said or ''} others' were {_other(before, after)}", after
        yield attack.name, said
    print(f"{kind}: {time.monotonic() - began:.1f} s", flush=True)


def _other(before: Any, after: Any) -> str:
    """Where two facts begin to differ."""
    one, two = json.dumps(before), json.dumps(after)
    at = next((n for n, (left, right) in enumerate(zip(one, two, strict=False)) if left != right), 0)
    return f"{one[max(at - 60, 0) : at + 60]!r} and are {two[max(at - 60, 0) : at + 60]!r}"


def _try(the: Scene, attack: Attack) -> str | None:
    try:
        return attack.do(the)
    except Exception as reason:  # noqa: BLE001 - each is told
        return f"{type(reason).__name__}: {str(reason)[:300]}"


if __name__ == "__main__":
    main()
