"""Faults side by side: each lane is a process of its own, so that all that comes of a fault is its descendant."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

from .core import Fault, Result, attempt
from .processes import adopt_orphans


def run(faults: Sequence[Fault], num_lanes: int, template: Path) -> Iterator[tuple[Fault, Result]]:
    """Try faults, each once, ``num_lanes`` at a time.

    Args:
        faults: in the order in which they begin.
        num_lanes: processes that try them.
        template: a folder with a small study.

    Yields:
        Each fault with its result, as they end.
    """
    context = multiprocessing.get_context("fork")
    lanes: dict[Connection, int] = {}
    left = list(range(len(faults)))
    for _ in range(min(num_lanes, len(faults))):
        ours, theirs = context.Pipe()
        context.Process(target=_serve, args=(theirs, faults, template)).start()
        theirs.close()
        lanes[ours] = left.pop(0)
        ours.send(lanes[ours])
    while lanes:
        for lane in wait(list(lanes)):
            assert isinstance(lane, Connection)
            number = lanes.pop(lane)
            yield faults[number], lane.recv()
            if left:
                lanes[lane] = left.pop(0)
                lane.send(lanes[lane])
            else:
                lane.send(None)


def _serve(asked: Connection, faults: Sequence[Fault], template: Path) -> None:
    adopt_orphans()
    while (number := asked.recv()) is not None:
        asked.send(attempt(faults[number], template))
