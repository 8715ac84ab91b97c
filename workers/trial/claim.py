"""A GPU runs one trial at a time, whichever search of this machine that belongs to: two would measure each other."""

from __future__ import annotations

import errno
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_LOOK_S = 0.1
_PEER = "3i"
"""``struct ucred``: process, user, group. Source: unix(7), SO_PEERCRED"""


@contextmanager
def alone_on(gpu: str, is_over: Callable[[], bool]) -> Iterator[int | None]:
    """Hold a GPU within the block, once no other process does.

    A name that the system gives to one socket at a time (unix(7), abstract addresses) ends with its process, and needs
    no file that one user makes and another may not open. Where there are none such, nothing is held.

    Args:
        gpu: its UUID.
        is_over: asked while another holds it; True ends the wait, and holds nothing.

    Yields:
        The process that was waited for, 0 where it is not known; None where none was.
    """
    waited_for: int | None = None
    with socket.socket(socket.AF_UNIX) as own:
        while not _holds(own, gpu) and not is_over():
            waited_for = _holder(gpu)
            time.sleep(_LOOK_S)
        yield waited_for


def _holds(own: socket.socket, gpu: str) -> bool:
    try:
        own.bind(_address(gpu))
        own.listen()
    except OSError as reason:
        return reason.errno != errno.EADDRINUSE
    return True


def _holder(gpu: str) -> int:
    with socket.socket(socket.AF_UNIX) as other, suppress(OSError, AttributeError):
        other.settimeout(_LOOK_S)
        other.connect(_address(gpu))
        found = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(_PEER))
        return int(struct.unpack(_PEER, found)[0])
    return 0


def _address(gpu: str) -> str:
    return f"\0autotune {gpu}"
