"""Limits on what clients send: requests a second for each token, and bytes that are no body."""

from __future__ import annotations

import math
import time

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..problems import Problem

_MOST_KNOWN = 1024
_MOST_HEAD_BYTES = 64 * 2**10
_FRAME_BYTES = 16
"""Bytes of a chunked body's frame, and more: a client may send it byte by byte."""


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


class BoundedProtocol(HttpToolsProtocol):
    """HTTP as uvicorn reads it. Ends a connection whose request line, headers, trailers or chunk extensions go on and
    on: httptools has no limit of its own."""

    _num_received = _num_body = 0

    def data_received(self, data: bytes) -> None:
        """Take what came, unless what came before was too much."""
        if self._num_received - (1 + _FRAME_BYTES) * self._num_body > _MOST_HEAD_BYTES:
            self.send_400_response(f"A head of at most {_MOST_HEAD_BYTES} bytes was expected.")
            return
        self._num_received += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Count anew."""
        self._num_received = self._num_body = 0
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        """A body has a limit of its own."""
        self._num_body += len(body)
        super().on_body(body)
