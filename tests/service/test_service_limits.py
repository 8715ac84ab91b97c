"""What clients can hold of a server: connections, heads, bodies and streams."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_runs import OPTIONS, bearer, listening
from starlette.datastructures import Headers

from autotune.service.client import Client, ServiceError
from autotune.service.service import Service, open_service
from autotune.service.web import limits
from autotune.service.web.app import make_app
from autotune.service.web.limits import BoundedProtocol, StreamLimit

HEAD = b"POST /v1/searches HTTP/1.1\r\nHost: localhost\r\n"


@contextmanager
def served(folder: Path) -> Iterator[tuple[int, str, Service, Any]]:
    """Port, token of its run, the service, and its application, over HTTP as ``autotune serve`` speaks it."""
    service = open_service(folder / "state", None, OPTIONS)
    app = make_app(service)
    with listening(app, http=BoundedProtocol) as port:
        yield port, service.tokens.make_for_run(), service, app


def connect(port: int) -> Any:
    return closing(socket.create_connection(("127.0.0.1", port), timeout=600))


def sent_until_closed(connection: socket.socket, most_bytes: int) -> int:
    """Bytes that the server took, or the system for it, before it closed the connection."""
    sent = 0
    try:
        while sent < most_bytes:
            sent += connection.send(b"x" * 2**16)
    except ConnectionError:
        pass
    return sent


def test_a_head_and_a_body_that_do_not_come_are_not_waited_for(tmp_path, monkeypatch):
    """Nothing, half a head, half of the next one, and of who has a token half a body: the connection is closed."""
    monkeypatch.setattr(limits, "_HEAD_S", 0.5)
    monkeypatch.setattr(limits, "_BODY_S", 0.1)
    with served(tmp_path) as (port, token, _, _):
        known = f"Authorization: Bearer {token}\r\nContent-Length: 9\r\n\r\n1".encode()
        for sent, answer in (
            (b"", b""),
            (HEAD, b""),
            (b"GET /healthz HTTP/1.1\r\n\r\n" + HEAD, b"200"),
            (HEAD + known, b""),
        ):
            with connect(port) as connection:
                connection.sendall(sent)
                said = b"".join(iter(lambda: connection.recv(2**16), b""))
                assert said[9:12] == answer, (sent, said)


def test_connections_without_a_token_keep_nobody_out(tmp_path, monkeypatch):
    """Of sixty half heads ten stay, the newest; others are answered, and a stream by which a token came goes on."""
    monkeypatch.setattr(limits, "_MOST_STRANGERS", 10)
    monkeypatch.setattr(limits, "_MOST_CONNECTIONS", 20)
    with served(tmp_path) as (port, token, _, _), ExitStack() as held:
        url, known = f"http://127.0.0.1:{port}", bearer(token)
        client = held.enter_context(Client(url, token))
        (tmp_path / "job").mkdir()
        (tmp_path / "job" / "model.py").write_text('{"holds_at": "reference"}')
        search_id = client.submit(tmp_path / "job", task="model.py")["id"]
        events = client.events(search_id)
        assert next(events)["kind"] == "state"
        many = [held.enter_context(connect(port)) for _ in range(60)]
        for each in many:
            try:
                each.sendall(HEAD)
            except ConnectionError:
                assert each is not many[-1]
        assert httpx.get(f"{url}/v1/searches", headers=known).status_code == 200
        assert many[0].recv(1) == b""
        many[-1].sendall(b"\r\n")
        assert many[-1].recv(12).startswith(b"HTTP/1.1 4")
        client.cancel(search_id, "now")
        assert [event["data"].get("state") for event in events][-1] == "CANCELLED"


def test_where_all_places_are_taken_by_known_callers_another_is_closed(tmp_path, monkeypatch):
    """Files are left for the database and for drivers."""
    monkeypatch.setattr(limits, "_MOST_STRANGERS", 1)
    monkeypatch.setattr(limits, "_MOST_CONNECTIONS", 3)
    with served(tmp_path) as (port, token, _, _), ExitStack() as held:
        request = f"GET /v1/searches HTTP/1.1\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
        for _ in range(3):
            connection = held.enter_context(connect(port))
            connection.sendall(request)
            assert connection.recv(12) == b"HTTP/1.1 200"
        with connect(port) as another:
            assert another.recv(1) == b""
        connection.recv(2**16)
        connection.sendall(request)
        assert connection.recv(12) == b"HTTP/1.1 200"


def test_of_a_body_that_is_refused_no_more_is_read(tmp_path):
    """Without a token, or too large: the answer comes before the body, and the connection ends within some MiB of 200,
    most of them the system's. A client that sends reads why."""
    with served(tmp_path) as (port, token, _, _):
        put = f"PUT /v1/archives/{'0' * 64} HTTP/1.1\r\n"
        for head, status in (
            (HEAD.decode() + "Content-Length: 99\r\n", b"401"),
            (f"{put}Content-Length: {200 * 2**20}\r\n", b"401"),
            (f"{put}Content-Length: {400 * 2**20}\r\nAuthorization: Bearer {token}\r\n", b"413"),
        ):
            with connect(port) as connection:
                connection.sendall(f"{head}\r\n".encode())
                assert connection.recv(12) == b"HTTP/1.1 " + status
                assert sent_until_closed(connection, 200 * 2**20) < 40 * 2**20
        (tmp_path / "job").mkdir()
        (tmp_path / "job" / "model.py").write_bytes(random.Random(0).randbytes(2**24))
        with Client(f"http://127.0.0.1:{port}", "atn_none") as client, pytest.raises(ServiceError, match="not known"):
            client.put_folder(tmp_path / "job")


def test_a_token_has_so_many_streams(tmp_path):
    """Two here: a third is refused until one of them is closed; another token has its own."""
    with served(tmp_path) as (port, token, service, app), ExitStack() as held:
        app.state.access = replace(app.state.access, streams=StreamLimit(2))
        url = f"http://127.0.0.1:{port}"
        (tmp_path / "job").mkdir()
        (tmp_path / "job" / "model.py").write_text('{"holds_at": "reference"}')
        with Client(url, token) as client:
            search_id = client.submit(tmp_path / "job", task="model.py")["id"]
        path = f"{url}/v1/searches/{search_id}/events"

        def opened(secret: str) -> Any:
            stream = httpx.stream("GET", path, headers={**bearer(secret), "Accept": "text/event-stream"}, timeout=600)
            return held.enter_context(stream)

        first, _ = opened(token), opened(token)
        assert first.status_code == 200
        refused = httpx.get(path, headers={**bearer(token), "Accept": "text/event-stream"})
        assert (refused.status_code, "2 event streams" in refused.text) == (429, True)
        assert app.state.access.refused_stream(Headers(bearer(token))) is not None  # before the route is found
        assert httpx.get(path, headers=bearer(token)).status_code == 200
        assert opened(service.tokens.create("ann", "read", 3600.0)[1]).status_code == 200
        first.close()
        while (again := opened(token)).status_code == 429:
            pass
        assert again.status_code == 200
        again.close()
        while app.state.access.refused_stream(Headers(bearer(token))) is not None:
            pass


@pytest.mark.medium
def test_streams_of_one_search_look_together(tmp_path, monkeypatch):
    """Twenty, while nothing happens: each asks for events once, and then they look by one query for all; the end of the
    search reaches them."""
    monkeypatch.setattr("autotune.service.web.following._LOOK_S", 0.02)
    with served(tmp_path) as (port, token, service, _), ExitStack() as held:
        (tmp_path / "job").mkdir()
        (tmp_path / "job" / "model.py").write_text('{"holds_at": "starting"}')
        with Client(f"http://127.0.0.1:{port}", token) as client:
            search_id = client.submit(tmp_path / "job", task="model.py")["id"]
            while client.search(search_id, wait_s=0.1)["state"] != "RUNNING":
                pass
            asked, looked = [], []
            events, shown = service.searches.events, service.searches.shown
            monkeypatch.setattr(service.searches, "events", lambda *given: asked.append(1) or events(*given))
            monkeypatch.setattr(service.searches, "shown", lambda found: looked.append(1) or shown(found))
            last = client.search(search_id)["num_events"]
            head = f"GET /v1/searches/{search_id}/events?after={last} HTTP/1.1\r\nHost: x\r\n"
            for _ in range(20):
                connection = held.enter_context(connect(port))
                connection.sendall(f"{head}Accept: text/event-stream\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
                assert connection.recv(2**12).startswith(b"HTTP/1.1 200")
            before = len(looked)
            while len(looked) < before + 5 and len(asked) <= 40:
                time.sleep(0.01)
            assert len(asked) == 20
            client.cancel(search_id, "now")
            said = b""
            while b"event: end" not in said:
                said += connection.recv(2**16)
        assert b"CANCELLED" in said
