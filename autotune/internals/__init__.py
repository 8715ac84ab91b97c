"""Private parts of other libraries that are used here (``table``), and state that outlives a call (``state``).

A use of a private name that is not in the table fails a test; so does a row that nothing uses. ``python -m
autotune.internals`` says what the installed versions lack.
"""

from __future__ import annotations

from .probes import broken, lost
from .table import FEATURES, TRIED, Feature

__all__ = ["FEATURES", "TRIED", "Feature", "broken", "lost"]
