"""A service in this process, with a driver that takes no time."""

from __future__ import annotations

import hashlib
import io
import json
import socket
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi.testclient import TestClient

from autotune.service.service import Service, open_service
from autotune.service.supervisor import RunnerOptions
from autotune.service.web.app import make_app

DRIVER = (sys.executable, str(Path(__file__).with_name("service_driver.py")))
OPTIONS = RunnerOptions(num_searches=2, lease_s=5.0, beat_s=0.05, pauses_s=(0.1, 0.1), program=DRIVER)
LOCAL = "http://localhost"


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@contextmanager
def serving(
    state: Path, options: RunnerOptions = OPTIONS, url: str | None = None, **more: Any
) -> Iterator[tuple[TestClient, Service]]:
    """A client with the token of the server's run, and the service."""
    service = open_service(state, url, options, **more)
    with TestClient(make_app(service), base_url=LOCAL, raise_server_exceptions=False) as client:
        client.headers.update(bearer(service.tokens.make_for_run()))
        yield client, service


def archive(**files: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name.replace("__", "."))
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return packed.getvalue()


def put(client: TestClient, data: bytes) -> Any:
    return client.put(f"/v1/archives/{hashlib.sha256(data).hexdigest()}", content=data)


def spec(client: TestClient, **script: Any) -> dict[str, Any]:
    """A search whose driver does what ``script`` says."""
    answer = put(client, archive(model__py=json.dumps(script)))
    assert answer.status_code in (200, 201), answer.text
    return {"task": "model.py", "archive": answer.json()["sha256"]}


def submit(client: TestClient, **script: Any) -> str:
    answer = client.post("/v1/searches", json=spec(client, **script))
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def until(client: TestClient, search_id: str, *states: str, timeout_s: float = 600.0) -> dict[str, Any]:
    """The search once it is in one of the states."""
    ends = time.monotonic() + timeout_s
    while True:
        search = client.get(f"/v1/searches/{search_id}").json()
        if search["state"] in states:
            return search
        assert time.monotonic() < ends, f"{search['state']} and not {states}: {search}"
        time.sleep(0.02)


ENDS = ("SUCCEEDED", "NOTHING_FITS", "FAILED", "ERROR", "CANCELLED")


@contextmanager
def listening(app: Any, **options: Any) -> Iterator[int]:
    """The port of a server of an application, in a thread."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def free_port() -> int:
    """One that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
