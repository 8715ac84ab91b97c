"""Structured pruning: a cut is found on a copy, written down as the indices that stay, and made from those alone."""

from .child import cut, obstacle
from .how import How
from .rebuild import check_whole, pruned_by, rebuild
from .record import Record

__all__ = ["How", "Record", "check_whole", "cut", "obstacle", "pruned_by", "rebuild"]
