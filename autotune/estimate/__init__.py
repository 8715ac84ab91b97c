"""Peak memory without running: what a step allocates at any batch, from a few over tensors without values."""

from __future__ import annotations

from .law import MemoryLaw, memory_law
from .rehearsal import Untraceable

__all__ = ["MemoryLaw", "Untraceable", "memory_law"]
