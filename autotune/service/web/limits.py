"""Rate limits: so many requests a second for each token, with bursts of two seconds' worth."""

from __future__ import annotations

import math
import time

from ..problems import Problem

_MOST_KNOWN = 1024


class RequestLimit:
    """A token bucket for each caller."""

    def __init__(self, per_s: float) -> None:
        """``per_s`` requests a second; a bucket holds those of two seconds."""
        self._per_s, self._full = per_s, 2 * per_s
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, who: str) -> None:
        """Let one request pass.

        Raises:
            Problem: 429, there were too many.
        """
        now = time.monotonic()
        left, at = self._left.get(who, (self._full, now))
        left = min(left + (now - at) * self._per_s, self._full)
        if len(self._left) > _MOST_KNOWN:
            self._left.clear()
        if left < 1:
            seconds = math.ceil((1 - left) / self._per_s)
            raise Problem(
                429,
                f"this token may ask {self._per_s:g} times a second. Ask again in {seconds} s.",
                retry_after=seconds,
            )
        self._left[who] = left - 1, now
