"""Faults of servers: killed, told to end, stopped past their leases, one too many."""

from __future__ import annotations

import signal
import time

import pytest

from ..service_place import Server
from .core import Fault
from .scene import LEASE_S, Scene


def kill_server(the: Scene) -> None:
    """SIGKILL; its driver goes on alone."""
    the.server.end(signal.SIGKILL)
    the.restart()
    the.go()


def _kill_twice(the: Scene) -> None:
    """The next is killed as it takes over."""
    the.server.end(signal.SIGKILL)
    the.restart()
    time.sleep(0.1)
    kill_server(the)


def _let_orphan_end(the: Scene) -> None:
    """The driver goes on, and ends, while there is no server."""
    the.server.end(signal.SIGKILL)
    the.go()
    time.sleep(0.7)
    the.restart()


def _end(the: Scene) -> None:
    """SIGTERM."""
    the.server.end(signal.SIGTERM)
    the.restart()
    the.go()


def _end_twice(the: Scene) -> None:
    """SIGTERM, and again."""
    the.server.send(signal.SIGTERM, signal.SIGTERM)
    _end(the)


def _pause(the: Scene) -> None:
    """SIGSTOP past its lease."""
    the.server.send(signal.SIGSTOP)
    the.go()
    time.sleep(LEASE_S + 0.3)
    the.server.send(signal.SIGCONT)


def _replace(the: Scene) -> None:
    """SIGSTOP past its lease; another takes over, and the first comes back."""
    first = the.server
    first.send(signal.SIGSTOP)
    time.sleep(LEASE_S + 0.1)
    the.unlock()
    the.restart()
    the.others.append(first)
    watched = the.blocker or the.search_id
    the.until(lambda: the.row(watched)["attempt"] >= 2 or the.row(watched)["ended_at"], "the second server")
    first.send(signal.SIGCONT)
    time.sleep(0.3)
    the.go()


def _start_second(the: Scene) -> None:
    """A second server on the same folder refuses, and changes nothing."""
    with pytest.raises(RuntimeError, match="another server uses this"):
        the.others.append(the.start())
    the.go()


def _share_the_file(the: Scene) -> None:
    """A second server with a state folder of its own, on the same SQLite file, refuses, and changes nothing."""
    with pytest.raises(RuntimeError, match=r"service\.db\.lock: another server uses this"):
        Server(the.folder / "elsewhere", the.url, the.options)
    the.go()


FAULTS = (
    Fault("server killed", kill_server),
    Fault("server killed twice", _kill_twice),
    Fault("server killed, driver ends alone", _let_orphan_end),
    Fault("server told to end", _end),
    Fault("server told to end twice", _end_twice),
    Fault("server stopped past its lease", _pause),
    Fault("server replaced while stopped", _replace),
    Fault("a second server", _start_second),
    Fault("a second server on the same SQLite file", _share_the_file),
)
