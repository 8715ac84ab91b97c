"""Limits on what clients do: requests a second and streams of each token, connections, what they send, and when."""

from __future__ import annotations

import logging
import math
import resource
import time
from asyncio import TimerHandle, Transport
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..problems import Problem

_LOG = logging.getLogger("autotune.service")
_MOST_KNOWN = 1024
_MOST_HEAD_BYTES = 64 * 2**10
_FRAME_BYTES = 16
"""Bytes of a chunked body's frame, and more: a client may send it byte by byte."""
_MOST_UNREAD_BYTES = 2**20
"""Of a body that was refused."""
_HEAD_S, _BODY_S = 10.0, 60.0
"""For a whole head; and for the next bytes of a body."""
_MOST_STRANGERS = 200
"""Connections by which no token came yet."""
_MOST_CONNECTIONS = (resource.getrlimit(resource.RLIMIT_NOFILE)[0] % 2**20 or 2**20) * 3 // 4
"""Of the files that the process may open; the others are for the database and for drivers."""
_TELL_S = 60.0


class RequestLimit:
    """So many requests a second: a token bucket for each caller, with bursts of two seconds' worth."""

    def __init__(self, per_s: float) -> None:
        """``per_s`` requests a second; a bucket holds those of two seconds."""
        self._per_s, self._full = per_s, 2 * per_s
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, who: str) -> None:
        """Let one request pass.

        Raises:
            Problem: 429, there were too many.
        """
        now = time.monotonic()
        left, at = self._left.get(who, (self._full, now))
        left = min(left + (now - at) * self._per_s, self._full)
        if len(self._left) > _MOST_KNOWN:
            self._left.clear()
        if left < 1:
            seconds = math.ceil((1 - left) / self._per_s)
            raise Problem(
                429,
                f"this token may ask {self._per_s:g} times a second. Ask again in {seconds} s.",
                retry_after=seconds,
            )
        self._left[who] = left - 1, now


class StreamLimit:
    """So many event streams at a time for each caller."""

    def __init__(self, most: int = 100) -> None:
        self._most = most
        self._open: Counter[str] = Counter()

    def refusal(self, who: str) -> Problem | None:
        """Of another stream; None where there is room."""
        if self._open[who] < self._most:
            return None
        return Problem(
            429, f"this token has {self._most} event streams, the most that may be open. Close one.", retry_after=5
        )

    @contextmanager
    def held(self, who: str) -> Iterator[None]:
        """While a stream is open.

        Raises:
            Problem: 429, there are too many.
        """
        if (refusal := self.refusal(who)) is not None:
            raise refusal
        self._open[who] += 1
        try:
            yield
        finally:
            self._open[who] -= 1


class BoundedProtocol(HttpToolsProtocol):
    """HTTP as uvicorn reads it, which has no limits of its own. Ends a connection whose request line, headers, trailers
    or chunk extensions go on and on, or take their time; whose body pauses, or goes on after its refusal; and where
    there are too many, that of those without a token which is the oldest."""

    _num_received = _num_body = _num_unread = 0
    _deadline: TimerHandle | None = None
    _told_at = -math.inf

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        super().connection_made(transport)
        self._strangers: dict[BoundedProtocol, None] = vars(self.server_state).setdefault("strangers", {})
        """Of this server, those by which no token came yet, the oldest first."""
        self._strangers[self] = None
        self._wait(_HEAD_S)
        if len(self._strangers) > _MOST_STRANGERS or len(self.connections) > _MOST_CONNECTIONS:
            self._make_room()

    def let_in(self) -> None:
        """A token came by it."""
        self._strangers.pop(self, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._strangers.pop(self, None)
        self._wait(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came, unless what came before was too much."""
        if self._num_received - (1 + _FRAME_BYTES) * self._num_body > _MOST_HEAD_BYTES:
            self.send_400_response(f"A head of at most {_MOST_HEAD_BYTES} bytes was expected.")
            return
        self._num_received += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Count anew."""
        self._num_received = self._num_body = self._num_unread = 0
        self._wait(_HEAD_S)
        super().on_message_begin()
        self.scope["state"]["connection"] = self

    def on_headers_complete(self) -> None:
        """Wait for the body."""
        self._wait(_BODY_S)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A body has a limit of its own; after its refusal some of it is read, lest the refusal is lost on its way."""
        self._num_body += len(body)
        if not self.cycle.response_complete:
            self._wait(_BODY_S)
        elif (unread := self._num_unread + len(body)) > _MOST_UNREAD_BYTES:
            self.transport.close()
        else:
            self._num_unread = unread
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is here."""
        self._wait(None)
        super().on_message_complete()

    def _wait(self, seconds: float | None) -> None:
        """End the connection then, unless something comes before."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._end)

    def _end(self) -> None:
        if self.flow.read_paused:  # it is we who do not read
            self._wait(_BODY_S)
        else:
            self.transport.close()

    def _make_room(self) -> None:
        """Of too many connections, close the oldest by which no token came."""
        num, oldest = len(self._strangers), next(iter(self._strangers))
        oldest.let_go()
        if self.loop.time() - BoundedProtocol._told_at > _TELL_S:
            BoundedProtocol._told_at = self.loop.time()
            _LOG.warning("%d connections, %d without a token: the oldest are closed", len(self.connections), num)

    def let_go(self) -> None:
        """Close it, to make room for others."""
        self._strangers.pop(self, None)
        self.transport.close()
