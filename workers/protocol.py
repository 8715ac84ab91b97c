"""Messages over a stream socket: four bytes of length, then JSON text."""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct("!I")


def send(connection: socket.socket, text: str) -> None:
    """Write one message.

    Raises:
        OSError: the other side is gone.
    """
    data = text.encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> str | None:
    """Read one message; None when the other side is gone, even in the middle of one.

    Raises:
        TimeoutError: the socket has a timeout, and nothing came.
    """
    head = _read(connection, _LENGTH.size)
    body = _read(connection, _LENGTH.unpack(head)[0]) if head is not None else None
    return body.decode() if body is not None else None


def _read(connection: socket.socket, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        try:
            part = connection.recv(size - len(data))
        except ConnectionError:
            return None
        if not part:
            return None
        data += part
    return data
