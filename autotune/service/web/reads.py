"""Batches reads of a search's state: requests that come during one query are answered by the next."""

from __future__ import annotations

import asyncio

from fastapi.concurrency import run_in_threadpool

from ..problems import Problem
from ..store.searches import Searches, Shown


class Reads:
    """One query at a time for all waiting requests, so that a hundred clients cost as much as a few."""

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
            raise Problem(404, f"there is no search {search_id[:40]!r}.")
        return shown

    async def _ask(self) -> None:
        try:
            while self._waiting:
                asked, self._waiting = self._waiting, {}
                try:
                    found = await run_in_threadpool(self._searches.shown, asked)
                except Exception as reason:  # noqa: BLE001 - each that waits is told
                    for answer in (each for answers in asked.values() for each in answers if not each.done()):
                        answer.set_exception(reason)
                    continue
                for search_id, answers in asked.items():
                    for answer in answers:
                        if not answer.done():  # its client has gone
                            answer.set_result(found.get(search_id))
        finally:
            self._asking = None
