"""Refuses several ranks where they are not supported, in place of training every rank on the same samples."""

from __future__ import annotations

import os
import sys

__all__ = ["RANK_VARIABLES", "world_size"]

RANK_VARIABLES = frozenset(
    {"WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE", "GROUP_RANK", "ROLE_WORLD_SIZE"}
    | {"ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"}
)
"""What torchrun tells a process of its place among others; its own of ``TORCHELASTIC_`` aside."""


def world_size() -> int:
    """Number of ranks: of torch.distributed's default group, or as torchrun has set it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    told = os.environ.get("WORLD_SIZE", "")
    return int(told) if told.isdecimal() else 1
