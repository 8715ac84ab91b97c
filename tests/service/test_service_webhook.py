"""The webhook: an address is told of each end once; one that hangs or refuses holds nothing up and is told again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue

import pytest
from fastapi.testclient import TestClient
from service_runs import ENDS, LOCAL, OPTIONS, bearer, submit, until

from autotune.service.service import open_service
from autotune.service.web import webhook
from autotune.service.web.app import make_app


class Address:
    """Answers what it is told to; ``None`` is not at all."""

    def __init__(self) -> None:
        self.heard: Queue[dict] = Queue()
        self.answers: list[int | None] = []
        self.over = threading.Event()
        address = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = address.answers.pop(0) if address.answers else 204
                address.heard.put({**body, "answer": answer})
                if answer is None:
                    address.over.wait()
                    return
                self.send_response(answer)
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hooks/s3cret"

    def next(self) -> tuple[str, str, int | None]:
        """The next that it hears: the search's id and state, and what it answered."""
        heard = self.heard.get(timeout=60)
        return heard["search"]["id"], heard["search"]["state"], heard["answer"]


@pytest.fixture
def address(monkeypatch) -> Iterator[Address]:
    monkeypatch.setattr(webhook, "_LOOK_S", 0.05)
    monkeypatch.setattr(webhook, "_MOST_S", 0.3)
    monkeypatch.setattr(webhook, "_PAUSES_S", (0.05,))
    found = Address()
    thread = threading.Thread(target=found.server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield found
    found.over.set()
    found.server.shutdown()
    thread.join()
    found.server.server_close()


@contextmanager
def serving(state, url):
    service = open_service(state, None, OPTIONS)
    with TestClient(make_app(service, webhook=url), base_url=LOCAL, raise_server_exceptions=False) as client:
        client.headers.update(bearer(service.tokens.make_for_run()))
        yield client


def test_each_end_is_told_once(tmp_path, address):
    """With a line for people, and the search as the API has it; a search that goes on and ends again is told again."""
    with serving(tmp_path / "s", address.url) as client:
        first = submit(client, trials=2)
        heard = address.heard.get(timeout=60)
        search = client.get(f"/v1/searches/{first}").json()
        assert heard["search"] == search
        assert heard["text"] == "model.py of (local): SUCCEEDED: settings without evidence"
        failed = submit(client, error="model.py: no build()\n  a frame", exit_code=2)
        assert address.heard.get(timeout=60)["text"] == "model.py of (local): FAILED: model.py: no build()"
        client.post(f"/v1/searches/{failed}/resume")
        assert address.next() == (failed, "FAILED", 204)
        assert address.heard.empty()


def test_an_address_that_hangs_or_refuses_holds_nothing_up_and_is_told_again(tmp_path, address, caplog):
    """No search waits for it; a redirect is not followed; the log has no path of the address, which may be a secret."""
    with serving(tmp_path / "s", address.url) as client:
        address.answers = [None, 500, 302]
        first = submit(client, trials=1)
        assert address.next() == (first, "SUCCEEDED", None)
        assert until(client, submit(client, trials=1, name="other"), *ENDS)["state"] == "SUCCEEDED"
        heard = [address.next() for _ in range(4)]
        assert sorted(answer for _, _, answer in heard) == [204, 204, 302, 500]
        assert {search_id for search_id, _, answer in heard if answer == 204} > {first}
    assert "the webhook at 127.0.0.1: no answer within 0.3 s; again in 0.05 s" in caplog.text
    assert "s3cret" not in caplog.text


def test_what_ended_while_nobody_listened_is_told_by_the_next_server(tmp_path, address):
    """The server is stopped before the address took it."""
    with serving(tmp_path / "s", "http://127.0.0.1:1/") as client:
        search_id = submit(client, trials=1)
        until(client, search_id, *ENDS)
    with serving(tmp_path / "s", address.url):
        assert address.next() == (search_id, "SUCCEEDED", 204)


@pytest.mark.parametrize("url", ["chat.example/hooks", "ftp://chat.example", "http://", "http://[::1"])
def test_what_is_no_address_is_refused(here, url, tmp_path):
    ended = here("serve", "--executor", "local", "--webhook", url, cwd=tmp_path)
    assert (ended.returncode, "a URL such as https://chat.example/hooks/autotune" in ended.stderr) == (2, True)
