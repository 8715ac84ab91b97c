"""The cards that were measured, and how well their rows are known."""

from __future__ import annotations

from typing import Literal

from autotune.estimates.cards import find_cards
from autotune.units import MIB

Known = Literal["developed on", "seen since", "held out"]
"""When rows were looked at: while the predictor was developed; once, at the end, and since, for causes in torch; once,
at the end."""

CARDS = {card.name.removesuffix("X"): card for card in find_cards("h100,h200,l40s,mi325x")}
"""Those whose rows are predicted, by name."""
RTX_3090 = find_cards("rtx3090")[0]
OLDER_CUDNN = 184 * MIB
"""What cuDNN's part of a context took more before CUDA 13, by milabench's rows of models with convolutions."""
FULL = 0.95
"""Above this share of a card torch gives cached segments back, so that a peak is less than its steps would take."""


def total_mib(name: str) -> int:
    """All of a card's memory, as its driver gives it; what the driver keeps counts as used."""
    return CARDS[name].memory_mib + CARDS[name].driver_mib
