"""A Python client of the service."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from uuid import uuid4

import httpx

from ..errors import PlanError, UserError
from ..files import replacing, write_text
from ..units import shortened
from .archives import pack
from .store.states import TERMINAL

_TRIES = 5
_LONGEST_WAIT_S = 30.0


class ServiceError(UserError):
    """The service refused, or cannot be reached; ``status`` is HTTP's, or 0 if nothing answered."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """``with Client("http://127.0.0.1:8470", token="atn_…") as client: client.submit(folder, task="model.py")``.

    What is asked is asked again where the connection is lost: a submit has a key by which the service knows it again.
    """

    def __init__(self, url: str, token: str | None = None, *, transport: httpx.BaseTransport | None = None) -> None:
        token = (token or "").strip()
        if not (token.isascii() and token.isprintable()):
            raise ServiceError("the token (AUTOTUNE_TOKEN) is none: atn_ and some letters and digits were expected.")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        timeout = httpx.Timeout(60.0, connect=10.0)
        try:
            self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout, transport=transport)
            if self._http.base_url.scheme not in ("http", "https") or not self._http.base_url.host:
                raise httpx.InvalidURL(url)
        except httpx.InvalidURL:
            raise ServiceError(
                f"--server: a URL such as http://127.0.0.1:8470 was expected, but got {url!r}."
            ) from None
        self._url = url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def put_folder(self, folder: Path, left_out: Collection[Path] = ()) -> str:
        """Send a folder as an archive, unless it is there already, without the files and folders ``left_out``; return
        its SHA-256."""
        data = pack(folder, left_out=left_out)
        sha256 = hashlib.sha256(data).hexdigest()
        self._ask("PUT", f"/v1/archives/{sha256}", content=data)
        return sha256

    def submit(self, folder: Path | None = None, /, *, key: str | None = None, **spec: Any) -> dict[str, Any]:
        """Queue a search.

        Args:
            folder: the job's folder, sent as an archive; None where ``spec`` has ``archive`` or ``folder``.
            key: the ``Idempotency-Key``: the same search asked for twice with one is queued once. None makes one.
            spec: the fields of :class:`.spec.SearchSpec`; its ``folder`` is one that the service sees.

        Raises:
            ServiceError: the service refused.
        """
        if folder is not None:
            spec["archive"] = self.put_folder(folder)
        headers = {"Idempotency-Key": key or uuid4().hex}
        found: dict[str, Any] = _json(self._ask("POST", "/v1/searches", json=spec, headers=headers))
        return found

    def searches(self, **like: Any) -> Iterator[dict[str, Any]]:
        """All searches, the newest first; or those of a ``state``, or of several, of an ``owner``, with a part of their
        ``name``."""
        params: dict[str, Any] = {"limit": 500} | {name: value for name, value in like.items() if value}
        while rows := _json(self._ask("GET", "/v1/searches", params=params)):
            yield from rows
            params["before"] = rows[-1]["number"]

    def turns(self) -> dict[str, list[dict[str, str]]]:
        """By the id of each search that waits for a device, those whose trials run there: ``id``, ``name``,
        ``owner``."""
        found: dict[str, list[dict[str, str]]] = _json(self._ask("GET", "/v1/turns"))
        return found

    def queue(self) -> dict[str, int]:
        """Places in the server's queue, from 1, by the ids of the searches that wait."""
        found: dict[str, int] = _json(self._ask("GET", "/v1/queue"))
        return found

    def search(self, search_id: str, *, wait_s: float = 0.0) -> dict[str, Any]:
        """One search; with ``wait_s``, as soon as it ends, or after so many seconds."""
        found: dict[str, Any] = _json(self._ask("GET", _path(search_id), params={"wait": wait_s}))
        return found

    def wait(self, search_id: str) -> dict[str, Any]:
        """The search once it has ended."""
        while (search := self.search(search_id, wait_s=_LONGEST_WAIT_S))["state"] not in TERMINAL:
            pass
        return search

    def events(self, search_id: str, after: int = 0) -> Iterator[dict[str, Any]]:
        """Events from ``after`` on, as they come, until the search has ended: ``seq``, ``kind`` and ``data``.

        A connection that is lost is made again, and goes on behind the last event.
        """
        tries = 0
        while tries < _TRIES:
            try:
                headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
                with self._http.stream("GET", _path(search_id, "events"), headers=headers) as answer:
                    if answer.is_error:
                        answer.read()
                        _refuse(answer)
                    for event in _parsed(answer.iter_lines()):
                        if event["kind"] == "end":
                            return
                        if event["kind"] == "refused":
                            raise ServiceError(event["data"]["detail"], event["data"]["status"])
                        after, tries = event["seq"], 0
                        yield event
            except httpx.TransportError:
                pass
            tries += 1
            time.sleep(0.2 * 2**tries)
        raise ServiceError(f"{self._url}: the connection was lost. Is the service up?")

    def trials(self, search_id: str) -> Iterator[dict[str, Any]]:
        """The trials' outcomes, by their numbers."""
        after = -1
        while rows := _json(self._ask("GET", _path(search_id, "trials"), params={"after": after})):
            yield from rows
            after = rows[-1]["number"]

    def text(self, search_id: str, what: Literal["plan", "report", "log"]) -> str:
        """Text of the plan (YAML), of the report, or of the end of the log."""
        return self._ask("GET", _path(search_id, what)).text

    def fetch(self, search_id: str, path: Path) -> None:
        """Write the plan to ``path``, and what belongs to it beside it.

        Raises:
            ServiceError: there is none.
            PlanError: it cannot be written.
        """
        text = self.text(search_id, "plan")
        for name, content in _json(self._ask("GET", _path(search_id, "files"))).items():
            with replacing(path.with_name(Path(name).name), PlanError) as temporary:
                temporary.write_bytes(base64.b64decode(content))
        write_text(path, text, PlanError)

    def cancel(self, search_id: str, mode: Literal["finish", "now"] = "finish") -> dict[str, Any]:
        """End a search: with the best so far as its plan, or now."""
        return self._changed("POST", _path(search_id, "cancel"), {"mode": mode})

    def set_priority(self, search_id: str, priority: int) -> dict[str, Any]:
        """Change a search's priority, 0 to 100."""
        return self._changed("PATCH", _path(search_id), {"priority": priority})

    def resume(self, search_id: str, **limits: Any) -> dict[str, Any]:
        """Go on with a search that was cancelled or failed, with other ``max_time`` or ``trials`` where given."""
        return self._changed("POST", _path(search_id, "resume"), limits)

    def delete(self, search_id: str) -> None:
        """Delete a search that has ended."""
        self._ask("DELETE", _path(search_id))

    def _changed(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        found: dict[str, Any] = _json(self._ask(method, path, json=body))
        return found

    def _ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Make a request, again if the connection is lost: no request does its work twice."""
        for left in reversed(range(_TRIES)):
            try:
                answer = self._http.request(method, path, **request)
            except httpx.TransportError as reason:
                if not left:
                    why = str(reason) or type(reason).__name__
                    raise ServiceError(f"{self._url}: the service cannot be reached: {why}. Is it up?") from None
            else:
                if answer.status_code not in (429, 503) or not left:
                    return _refuse(answer)
            time.sleep(0.1 * 2 ** (_TRIES - left))
        raise AssertionError


def _refuse(answer: httpx.Response) -> httpx.Response:
    if not answer.is_error:
        return answer
    try:
        detail = str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        detail = f"{answer.status_code} {answer.reason_phrase}. Is that an autotune service?"
    raise ServiceError(detail, answer.status_code)


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        raise ServiceError(f"{answer.url}: no JSON was answered. Is that an autotune service?") from None


def _path(search_id: str, what: str = "") -> str:
    """Path of a search, or of something of it."""
    if not re.fullmatch("[0-9a-f]{16}", search_id):
        raise ServiceError(
            f"{shortened(search_id)!r}: a search's id was expected, 16 of 0-9 and a-f, as `autotune status` shows it."
        )
    return f"/v1/searches/{search_id}/{what}".rstrip("/")


def _parsed(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation"""
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name:
            fields[name] = value.removeprefix(" ")
        elif line == "":
            if "data" in fields:
                seq = int(fields["id"]) if "id" in fields else 0
                yield {"seq": seq, "kind": fields.get("event", "message"), "data": json.loads(fields["data"])}
            fields = {}
