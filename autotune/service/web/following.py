"""Following a search: its state now, read once for all who ask meanwhile; and its events as they are stored."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ...errors import Caught
from ..problems import Problem
from ..service import Service
from ..store.events import EventRow
from ..store.searches import Searches, Shown, no_search

_LOOK_S = 0.5
_PING_S = 15.0
_CHECK_S = 5.0
"""Seconds between two checks that the token is still valid."""
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class Reads:
    """One query at a time for all waiting requests, so that a hundred clients cost as much as a few: those that come
    during one query are answered by the next."""

    def __init__(self, searches: Searches) -> None:
        self._searches = searches
        self._waiting: dict[str, list[asyncio.Future[Shown | None]]] = {}
        self._asking: asyncio.Task[None] | None = None

    async def get(self, search_id: str) -> Shown:
        """A search as it is now.

        Raises:
            Problem: 404.
        """
        answer: asyncio.Future[Shown | None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(search_id, []).append(answer)
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        shown = await answer
        if shown is None:
            raise no_search(search_id)
        return shown

    async def _ask(self) -> None:
        try:
            while self._waiting:
                asked, self._waiting = self._waiting, {}
                with Caught(frames=True) as raised:  # each that waits is told
                    found = await run_in_threadpool(self._searches.shown, asked)
                if (reason := raised.error) is not None:
                    for answer in (each for answers in asked.values() for each in answers if not each.done()):
                        answer.set_exception(reason)
                    continue
                for search_id, answers in asked.items():
                    for answer in answers:
                        if not answer.done():  # its client has gone
                            answer.set_result(found.get(search_id))
        finally:
            self._asking = None


async def stream(request: Request, service: Service, search_id: str, after: int) -> StreamingResponse:
    """Server-sent events: those above ``after``, then new ones; they end with the search's last, or with the token.

    Raises:
        Problem: 404.
    """
    await request.app.state.reads.get(search_id)
    return _Stream(_lines(request, service, search_id, after), media_type="text/event-stream", headers=_HEADERS)


class _Stream(StreamingResponse):
    """One of those that a token may have open."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it.

        Raises:
            Problem: 429.
        """
        request = Request(scope)
        with request.app.state.access.streams.held(request.state.caller.token_id):
            await super().__call__(scope, receive, send)


async def _lines(request: Request, service: Service, search_id: str, after: int) -> AsyncIterator[str]:
    checked = pinged = time.monotonic()
    reads: Reads = request.app.state.reads
    seen = None
    yield "retry: 2000\n\n"
    while True:
        try:
            if time.monotonic() - checked > _CHECK_S:
                checked = time.monotonic()
                await run_in_threadpool(request.app.state.access.caller, request)
            tag = (await reads.get(search_id)).tag
            events, is_over = list[EventRow](), False
            if tag != seen:
                events, is_over = await run_in_threadpool(service.searches.events, search_id, after)
        except Problem as problem:  # revoked, or deleted
            yield f"event: refused\ndata: {json.dumps({'status': problem.status, 'detail': problem.detail})}\n\n"
            return
        for event in events:
            after = event.seq
            yield f"id: {event.seq}\nevent: {event.kind}\ndata: {json.dumps({**event.data, 'at': event.at})}\n\n"
        if is_over:
            yield "event: end\ndata: {}\n\n"
            return
        if not events:
            seen = tag
            if time.monotonic() - pinged > _PING_S:
                pinged = time.monotonic()
                yield ": still here\n\n"
            await asyncio.sleep(_LOOK_S - time.monotonic() % _LOOK_S)  # all look at once, which is one query
