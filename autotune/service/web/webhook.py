"""The webhook: whenever a search has ended, an address is told."""

from __future__ import annotations

import asyncio
import logging
import time

import httpx
from fastapi.concurrency import run_in_threadpool
from sqlalchemy.exc import SQLAlchemyError

from ...errors import UserError
from ..service import Service
from ..store.database import words_of
from ..store.searches import Search

_LOG = logging.getLogger("autotune.service")
_LOOK_S = 0.5
_MOST_S = 10.0
"""For one try, whatever the address does meanwhile."""
_PAUSES_S = (10.0, 30.0, 60.0, 300.0)
"""Before each further try; the last is that of all after it."""
_WHILE_S = 3600.0
"""What ended longer ago is told to nobody: not by a try more, nor by a server that has just got an address."""
_AT_ONCE = 8


def check_url(url: str) -> None:
    """Refuse what is no address.

    Raises:
        UserError: so it is.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError("--webhook: a URL such as https://chat.example/hooks/autotune was expected, and is none.")


class Webhook:
    """Tells an address of each search that has ended. What it took is stored, so that a server that comes back tells
    the others; no search waits for it."""

    def __init__(self, service: Service, url: str) -> None:
        self._service, self._url = service, url
        self._failed: dict[tuple[str, float], tuple[int, float]] = {}
        """Of ends that were not taken: how often, and when the next try is."""

    async def run(self) -> None:
        """Until it is cancelled."""
        async with httpx.AsyncClient(timeout=None) as client:
            while True:
                try:
                    await self._look(client)
                except SQLAlchemyError as reason:
                    _LOG.error("the database failed: %s", words_of(reason))
                await asyncio.sleep(_LOOK_S)

    async def _look(self, client: httpx.AsyncClient) -> None:
        service = self._service
        ended = await run_in_threadpool(service.searches.untold, service.home, _WHILE_S)
        self._failed = {key: self._failed[key] for each in ended if (key := _key(each)) in self._failed}
        due = [each for each in ended if self._failed.get(_key(each), (0, 0.0))[1] <= time.monotonic()]
        await asyncio.gather(*(self._tell(client, each) for each in due[:_AT_ONCE]))

    async def _tell(self, client: httpx.AsyncClient, search: Search) -> None:
        body = {"text": words(search), "search": search.model_dump(mode="json")}
        try:
            async with asyncio.timeout(_MOST_S), client.stream("POST", self._url, json=body) as answer:
                said = None if answer.is_success else f"it answered {answer.status_code}"
        except TimeoutError:
            said = f"no answer within {_MOST_S:g} s"
        except (httpx.HTTPError, OSError, ValueError) as reason:
            said = str(reason) or type(reason).__name__
        if said is None:
            await run_in_threadpool(self._service.searches.told, *_key(search))
            return
        num, _ = self._failed.get(_key(search), (0, 0.0))
        pause_s = _PAUSES_S[min(num, len(_PAUSES_S) - 1)]
        self._failed[_key(search)] = num + 1, time.monotonic() + pause_s
        host = httpx.URL(self._url).host  # the rest may be a secret
        _LOG.warning("search %s: the webhook at %s: %s; again in %g s", search.id, host, said, pause_s)


def words(search: Search) -> str:
    """A search that has ended, on one line."""
    result = search.summary.get("result") or {}
    said = result.get("words") or search.message.partition("\n")[0]
    return f"{search.name} of {search.owner}: {search.state}" + (f": {said}" if said else "")


def _key(search: Search) -> tuple[str, float]:
    return search.id, search.ended_at or 0.0
