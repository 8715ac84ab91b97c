"""The cheapest set of things that fits into the room in every row: a multi-dimensional knapsack with rules about what
goes together, solved by HiGHS.

Source: https://docs.scipy.org/doc/scipy/reference/generated/scipy.optimize.milp.html
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_MOST_NODES = 2000
"""Limit on the solver's tree, after which the best found so far is taken: unlike a time limit it gives the same each
time. Random problems of 96 blocks took 29 at most."""
_GAP = 0.005
"""How far above the least cost a set with rules may be: to the last bit, 96 unlike blocks with three ways each took a
minute."""
_TOTAL = 1e6
"""Total to which costs are scaled: the solver takes objectives within 1e-6 of each other for equal."""


@dataclass(frozen=True)
class Rules:
    """Which things go together."""

    one_of: tuple[tuple[int, ...], ...] = ()
    """Of each of these, at most one is chosen."""
    needs: tuple[tuple[int, int], ...] = ()
    """The first is chosen only where the second is."""


def cheapest(
    costs: Sequence[float],
    changes: Any,
    room: Any,
    excluded: Sequence[tuple[int, ...]] = (),
    rules: Rules = Rules(),
) -> tuple[int, ...] | None:
    """Choose the set of least cost whose changes add up to at most the room in every row.

    Args:
        costs: of each thing, >= 0.
        changes: (rows, things): what each thing adds to each row; negative where it takes away.
        room: (rows,): of each; negative where something must be taken away.
        excluded: sets that are not to be chosen.
        rules: that the set keeps.

    Returns:
        Numbers of the chosen, ascending; with rules, a set that costs at most 0.5 % more. Of sets whose costs differ by
        less than some millionths of them all, it is the one of fewer and of earlier things. With rules, the
        first of groups that are alike have the first choices, as one pass of swaps between two groups leaves them. Rows
        hold within a millionth of the largest number in them. None where no set fits, or none was found.
    """
    rows, bounds = np.asarray(changes, float), np.asarray(room, float)
    scale = max(np.abs(rows).max(initial=0.0), np.abs(bounds).max(initial=0.0), 1.0)
    held = [(row / scale, bound / scale) for row, bound in zip(rows, bounds, strict=True)]
    for one in excluded:
        signs = np.full(len(costs), -1.0)
        signs[list(one)] = 1.0
        held.append((signs, len(one) - 1.0))
    more = _as_rows(rules, len(costs))
    found = _solved(_distinct(costs), [*held, *more], len(costs), _GAP if more else 0.0)
    return found if found is None or not more else _earliest(found, np.asarray(costs, float), [*held, *more], rules)


def smallest(base: Any, changes: Any, rules: Rules = Rules()) -> tuple[int, ...] | None:
    """Choose the set with which the largest row is as small as can be.

    Args:
        base: (rows,): of each where nothing is chosen.
        changes: (rows, things): what each thing adds to each row.
        rules: that the set keeps.

    Returns:
        Numbers of the chosen, ascending; None where none was found.
    """
    rows, bounds = np.asarray(changes, float), np.asarray(base, float)
    count, scale = rows.shape[1], max(np.abs(rows).max(initial=0.0), np.abs(bounds).max(initial=0.0), 1.0)
    held = [(np.append(row / scale, -1.0), -bound / scale) for row, bound in zip(rows, bounds, strict=True)]
    held += [(np.append(row, 0.0), bound) for row, bound in _as_rows(rules, count)]
    return _solved(np.append(np.full(count, 1e-9), 1.0), held, count, 0.0)


def _as_rows(rules: Rules, count: int) -> list[tuple[np.ndarray, float]]:
    found = []
    for several in rules.one_of:
        row = np.zeros(count)
        row[list(several)] = 1.0
        found.append((row, 1.0))
    for first, second in rules.needs:
        row = np.zeros(count)
        row[first], row[second] = 1.0, -1.0
        found.append((row, 0.0))
    return found


def _solved(
    costs: np.ndarray, held: Sequence[tuple[np.ndarray, float]], count: int, gap: float
) -> tuple[int, ...] | None:
    """The first ``count`` unknowns are chosen or not; one beyond them is any number."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # tens of MiB, which would count as a trial's own

    is_choice = np.arange(len(costs)) < count
    constraints = []
    if held:
        rows, bounds = zip(*held, strict=True)
        constraints = [LinearConstraint(np.array(rows), ub=np.array(bounds))]
    found = milp(
        costs,
        integrality=is_choice.astype(int),
        bounds=Bounds(np.where(is_choice, 0.0, -np.inf), np.where(is_choice, 1.0, np.inf)),
        constraints=constraints,
        options={"mip_rel_gap": gap, "node_limit": _MOST_NODES},
    )
    return None if found.x is None else tuple(map(int, np.flatnonzero(found.x[:count] > 0.5)))


def _earliest(
    found: tuple[int, ...], costs: np.ndarray, held: Sequence[tuple[np.ndarray, float]], rules: Rules
) -> tuple[int, ...]:
    """The set after one pass of swaps between groups of one size, each at no more cost and within the same rows: the
    first of blocks that are alike have the first way. So close limits mostly have the same set, and it is traced once.
    """
    rows, bounds = map(np.array, zip(*held, strict=True))
    chosen = np.zeros(len(costs))
    chosen[list(found)] = 1.0
    used, most = rows @ chosen, costs @ chosen + costs.sum() / _TOTAL
    room = np.maximum(bounds, used) + 1 / _TOTAL
    for first, second in itertools.combinations(map(list, rules.one_of), 2):
        one, other = chosen[first], chosen[second]
        if len(one) != len(other) or tuple(one) >= tuple(other):
            continue
        both, change = first + second, np.concatenate([other - one, one - other])
        then = used + rows[:, both] @ change
        if (then <= room).all() and costs @ chosen + costs[both] @ change <= most:
            chosen[both] += change
            used = then
    return tuple(map(int, np.flatnonzero(chosen > 0.5)))


def _distinct(costs: Sequence[float]) -> np.ndarray:
    """The costs, scaled, each a little above the one before it, so that none is zero and no two are equal."""
    scaled = np.asarray(costs, float) * (_TOTAL / (sum(costs) or 1.0))
    distinct: np.ndarray = scaled + 1 + np.arange(1, len(costs) + 1) / len(costs) ** 2
    return distinct
