"""Faults of clients: cancels that race, uploads that are cut, one submit a hundred times, readers that never read."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from contextlib import ExitStack

from autotune.service.archives import pack

from .core import ANY_END, Fault
from .scene import Scene
from .servers import kill_server

_EQUAL, _SILENT = 100, 20


def _cancel_finish(the: Scene) -> None:
    """Cancelled, with the best so far."""
    the.server.client.cancel(the.search_id)
    the.go()


def _cancel_now(the: Scene) -> None:
    """Cancelled at once."""
    the.server.client.cancel(the.search_id, "now")
    the.go()


def _cancel_race(the: Scene) -> None:
    """Ten cancels that race with the end."""
    the.go()
    for _ in range(10):
        the.server.client.cancel(the.search_id)


def _cancel_then_kill(the: Scene) -> None:
    """Cancelled, and the server is killed."""
    the.server.client.cancel(the.search_id)
    kill_server(the)


def _head(the: Scene, what: str, length: int, *more: str, token: str | None = None) -> bytes:
    bearer = f"Authorization: Bearer {token or the.template.token}"
    lines = [f"{what} HTTP/1.1", "Host: localhost", bearer, f"Content-Length: {length}"]
    return "\r\n".join([*lines, *more, "", ""]).encode()


def _connect(the: Scene) -> socket.socket:
    return socket.create_connection(("127.0.0.1", the.server.port), timeout=30)


def _answer(connection: socket.socket) -> tuple[int, bytes]:
    with connection.makefile("rb") as file:
        status = int(file.readline().split()[1])
        length = 0
        while (line := file.readline()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        return status, file.read(length)


def _cut_upload(the: Scene) -> None:
    """The client goes in the middle of an archive, and before the answer; nothing is left, and it is taken after."""
    job = the.job("other", {"trials": 1}, padding=2**20)
    data = pack(job)
    archives = the.state / "archives"
    path = f"PUT /v1/archives/{hashlib.sha256(data).hexdigest()}"
    for sent in (0, 1, len(data) // 2, len(data) - 1, len(data)):
        with _connect(the) as connection:
            connection.sendall(_head(the, path, len(data)) + data[:sent])
    the.until(lambda: not list(archives.glob(".*")), "what was cut to be removed")
    the.more.append(str(the.server.client.submit(job, task="model.py")["id"]))
    the.go()


def _submit_often(the: Scene) -> None:
    """A hundred equal submits at once under one key queue one search; another search under that key is refused; a
    client that goes before the answer has queued it all the same."""
    archive = the.server.client.put_folder(the.job("equal", {"trials": 1}))
    body = json.dumps({"task": "model.py", "archive": archive, "name": "equal"}).encode()
    key = ("Content-Type: application/json", "Idempotency-Key: one")
    request = _head(the, "POST /v1/searches", len(body), *key)
    with _connect(the) as gone:
        gone.sendall(request + body)
    with ExitStack() as stack:
        connections = [stack.enter_context(_connect(the)) for _ in range(_EQUAL)]
        for connection in connections:
            connection.sendall(request + body)
        answers = [_answer(connection) for connection in connections]
        assert {status for status, _ in answers} <= {200, 201}, answers
        ids = {json.loads(answer)["id"] for _, answer in answers}
        assert len(ids) == 1, ids
        other = body.replace(b"equal", b"other")
        connections[0].sendall(_head(the, "POST /v1/searches", len(other), *key) + other)
        assert _answer(connections[0])[0] == 422
    assert sum(each["name"] == "equal" for each in the.server.client.searches()) == 1
    the.more.extend(ids)
    the.go()


def _never_read(the: Scene) -> None:
    """Streams that nobody reads, while the search goes on; others are answered."""
    with ExitStack() as stack:
        for _ in range(_SILENT):
            connection = stack.enter_context(_connect(the))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            path = f"GET /v1/searches/{the.search_id}/events"
            connection.sendall(_head(the, path, 0, "Accept: text/event-stream"))
        the.go()
        began = time.monotonic()
        the.server.client.search(the.search_id)
        assert time.monotonic() - began < 5, "others wait for those that do not read"
        the.check(*ANY_END)


def _revoke(the: Scene) -> None:
    """A token is revoked while its stream is open: the stream ends, and says why; the search goes on."""
    body = json.dumps({"name": "reader", "role": "read"}).encode()
    with _connect(the) as mine, _connect(the) as theirs:
        mine.sendall(_head(the, "POST /v1/tokens", len(body), "Content-Type: application/json") + body)
        made = json.loads(_answer(mine)[1])
        path = f"GET /v1/searches/{the.search_id}/events"
        theirs.sendall(_head(the, path, 0, "Accept: text/event-stream", token=made["token"]))
        told = theirs.recv(2**16)
        mine.sendall(_head(the, f"DELETE /v1/tokens/{made['id']}", 0))
        assert _answer(mine)[0] == 204
        while b"event: refused" not in told:
            part = theirs.recv(2**16)
            assert part, f"the stream ended without a word: {told[-300:]!r}"
            told += part
    the.go()


FAULTS = (
    Fault("cancel finish", _cancel_finish, ends=ANY_END),
    Fault("cancel now", _cancel_now, ends=ANY_END),
    Fault("ten cancels race with the end", _cancel_race, ends=ANY_END),
    Fault("cancelled, then server killed", _cancel_then_kill, ends=ANY_END),
    Fault("upload cut", _cut_upload),
    Fault("a hundred equal submits", _submit_often),
    Fault("streams that nobody reads", _never_read),
    Fault("token revoked in mid-stream", _revoke),
)
