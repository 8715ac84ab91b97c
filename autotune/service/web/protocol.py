"""HTTP as uvicorn reads it, with a limit on what is no body: httptools has none of its own."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MOST_HEAD_BYTES = 64 * 2**10
_FRAME_BYTES = 16
"""Bytes of a chunked body's frame, and more: a client may send it byte by byte."""


class BoundedProtocol(HttpToolsProtocol):
    """Ends a connection whose request line, headers, trailers or chunk extensions go on and on."""

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
