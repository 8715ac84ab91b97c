"""Models made smaller for good. Structured pruning: a cut is found on a copy, written down as the indices that stay,
and made from those alone. Low rank: linear layers become products of two."""

from .child import cut, cut_each, groups, obstacle
from .factors import (
    Wanted,
    check_not_factorised,
    choose_ranks,
    factorise,
    factorised_by,
    is_replaced,
    linear_features,
)
from .how import Group, How
from .rebuild import check_whole, pruned_by, rebuild
from .record import Record

__all__ = [
    "Group",
    "How",
    "Record",
    "Wanted",
    "check_not_factorised",
    "check_whole",
    "choose_ranks",
    "cut",
    "cut_each",
    "factorise",
    "factorised_by",
    "groups",
    "is_replaced",
    "linear_features",
    "obstacle",
    "pruned_by",
    "rebuild",
]
