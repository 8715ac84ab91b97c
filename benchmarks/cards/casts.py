"""Backward within autocast, as some jobs have it: the weights' copies in lower precision stay until the step's end.

Autocast forgets them where its outermost context ends. A step here leaves that before backward, so that the context is
kept open by torch's own count until the optimizer has stepped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def keep_casts() -> None:
    """Call it within autocast, before the model."""
    torch.clear_autocast_cache()
    torch.autocast_increment_nesting()


class LastingCastsSGD(torch.optim.SGD):
    """The end of what :func:`keep_casts` keeps."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """As SGD's."""
        found = super().step(closure)  # type: ignore[arg-type]
        while torch.autocast_increment_nesting() > 1:
            torch.autocast_decrement_nesting()
            torch.autocast_decrement_nesting()
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        return found
