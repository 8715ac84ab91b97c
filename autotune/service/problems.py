"""``Problem``: an HTTP error of the service."""

from __future__ import annotations

from typing import Any


class Problem(Exception):
    """A refusal: HTTP's ``status``, and words that say what was wanted, what was got and what to do."""

    def __init__(self, status: int, detail: str, **more: Any) -> None:
        super().__init__(detail)
        self.status, self.detail, self.more = status, detail, more
