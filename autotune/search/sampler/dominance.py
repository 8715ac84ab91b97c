"""Techniques that only trade time for memory are dominated where memory is not short."""

from __future__ import annotations

from collections.abc import Callable

from ...estimate import Prediction
from ...techniques import Settings
from ...techniques.batch import Batch


def buys_memory(settings: Settings) -> bool:
    """Whether any technique trades time for memory."""
    return any(one.trades_time and one != type(one)() for one in settings.techniques())


def is_needless(
    settings: Settings, largest: Batch | None, predict: Callable[[Settings], Prediction | None], usable_bytes: float
) -> bool:
    """Whether a configuration trades time for memory although even the largest batch is sure to fit without.

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
