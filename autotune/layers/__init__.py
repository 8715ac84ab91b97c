"""Memory-saving layers: a converted model keeps for backward only what its backward reads.

:func:`convert` and :func:`restore` work in place. Parameters, hooks, sharing and ``state_dict`` keys stay, values are
stock torch's, and gradients are within the rounding of their type. Second derivatives through what was saved are
refused; under ``torch.compile`` and within ``torch.func`` transforms the model is stock.

Source of the idea: Bhatia and Dangel 2024, arXiv:2404.12406.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from .convert import convert, restore
from .intercept import Forward
from .sites import Site

__all__ = ["answered", "convert", "restore"]


def answered() -> AbstractContextManager[Any]:
    """Within the block, functional calls outside any module are answered too: those of a loss."""
    return Forward(Site())
