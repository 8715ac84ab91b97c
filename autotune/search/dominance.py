"""Techniques that only ever buy memory with time, where no memory is wanting."""

from __future__ import annotations

from collections.abc import Callable

from ..estimate import Prediction
from ..techniques import Settings
from ..techniques.batch import Batch

__all__ = ["buys_memory", "is_needless"]


def buys_memory(settings: Settings) -> bool:
    """Whether any technique buys memory with time."""
    return any(one.trades_time and one != type(one)() for one in settings.techniques())


def is_needless(
    settings: Settings, largest: Batch | None, predict: Callable[[Settings], Prediction | None], usable_bytes: float
) -> bool:
    """Whether memory is bought with time although none is wanting: without that, even the largest batch is sure to fit.

    Args:
        settings: the configuration.
        largest: batch there is; None where nothing chooses it.
        predict: what is known of a configuration.
        usable_bytes: what a peak may be.
    """
    if not buys_memory(settings):
        return False
    stock = {one.name: type(one)() for one in settings.techniques() if one.trades_time}
    known = predict(settings.model_copy(update={**stock, "batch": largest}))
    return known is not None and (known.high_bytes or known.peak_bytes) <= usable_bytes
