"""Server-sent events: the stored events after a number, then new ones as they are stored."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from ..problems import Problem
from ..service import Service

_LOOK_S = 0.5
_PING_S = 15.0
_CHECK_S = 5.0
"""Seconds between two checks that the token is still valid."""
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


async def stream(request: Request, service: Service, search_id: str, after: int) -> StreamingResponse:
    """The events above ``after``; it ends with the search's last, or with the token.

    Raises:
        Problem: 404.
    """
    await run_in_threadpool(service.searches.get, search_id)
    return StreamingResponse(
        _lines(request, service, search_id, after), media_type="text/event-stream", headers=_HEADERS
    )


async def _lines(request: Request, service: Service, search_id: str, after: int) -> AsyncIterator[str]:
    checked = pinged = time.monotonic()
    yield "retry: 2000\n\n"
    while True:
        try:
            if time.monotonic() - checked > _CHECK_S:
                checked = time.monotonic()
                await run_in_threadpool(request.app.state.access.caller, request)
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
            if time.monotonic() - pinged > _PING_S:
                pinged = time.monotonic()
                yield ": still here\n\n"
            await asyncio.sleep(_LOOK_S)
