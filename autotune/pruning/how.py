"""What is asked of a cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Criterion = Literal["l1", "l2", "lamp", "random"]
"""``l1``, ``l2``: the norm of a channel's weights, over the mean of its layer. ``lamp``: Lee et al. 2021,
arXiv:2010.07611. ``random``: seeded, to hold the others against."""
Scope = Literal["layer", "global", "isomorphic"]
"""Among what channels are ranked: those of one layer, of the model, or of layers that are alike (Fang et al. 2024,
arXiv:2407.04616)."""


@dataclass(frozen=True)
class How:
    """What is asked of a cut."""

    ratio: float
    """Share of channels, hidden units and heads that go; at least 0, below 1."""
    criterion: Criterion = "l2"
    scope: Scope = "layer"
    round_to: int = 1
    """Widths become multiples of it, downwards."""
    heads: bool = True
    """Cut whole heads of attention too."""
    untouchable: tuple[str, ...] = ()
    """Module paths that keep every tensor, with what is in them."""
    ratios: Mapping[str, float] | None = None
    """Of groups by their first layer's path, each with a ratio of its own; 0 keeps it whole. Those that are not named
    go by ``ratio``."""


@dataclass(frozen=True)
class Group:
    """Layers whose channels, or heads of attention, are cut by one ratio."""

    first: str
    """Path of the first layer, by which :attr:`How.ratios` names it."""
    layers: tuple[str, ...]
    """Paths of all layers that become smaller, the first among them."""
    width: int
    """Channels of the first layer; of attention, heads."""
    kind: Literal["channels", "heads"]
