"""The cheapest subset that fits into the room in every row: a multi-dimensional knapsack, solved by HiGHS.

Source: https://docs.scipy.org/doc/scipy/reference/generated/scipy.optimize.milp.html
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MOST_NODES = 2000
"""Limit on the solver's tree, after which the best found so far is taken: unlike a time limit it gives the same each
time. Random problems of 96 blocks took 29 at most."""
_TOTAL = 1e6
"""Total to which costs are scaled: the solver takes objectives within 1e-6 of each other for equal."""


def cheapest(
    costs: Sequence[float],
    changes: Sequence[Sequence[float]],
    room: Sequence[float],
    excluded: Sequence[tuple[int, ...]] = (),
) -> tuple[int, ...] | None:
    """Choose the set of least cost whose changes add up to at most the room in every row.

    Args:
        costs: of each thing, >= 0.
        changes: for each row, what each thing adds to it; negative where it takes away.
        room: of each row; negative where something must be taken away.
        excluded: sets that are not to be chosen.

    Returns:
        Numbers of the chosen, ascending. Of sets whose costs differ by less than some millionths of them all, it is the
        one of fewer and of earlier things. Rows hold within a millionth of the largest number in them. None where no
        set fits, or none was found.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # tens of MiB, which would count as a trial's own

    rows, bounds = np.asarray(changes, float), np.asarray(room, float)
    scale = max(np.abs(rows).max(initial=0.0), np.abs(bounds).max(initial=0.0), 1.0)
    constraints = [LinearConstraint(rows / scale, ub=bounds / scale)]
    for one in excluded:
        signs = np.full(len(costs), -1.0)
        signs[list(one)] = 1.0
        constraints.append(LinearConstraint(signs, ub=len(one) - 1.0))
    found = milp(
        _distinct(costs),
        integrality=np.ones(len(costs)),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"mip_rel_gap": 0.0, "node_limit": _MOST_NODES},
    )
    return None if found.x is None else tuple(map(int, np.flatnonzero(found.x > 0.5)))


def _distinct(costs: Sequence[float]) -> np.ndarray:
    """The costs, scaled, each a little above the one before it, so that none is zero and no two are equal."""
    scaled = np.asarray(costs, float) * (_TOTAL / (sum(costs) or 1.0))
    distinct: np.ndarray = scaled + 1 + np.arange(1, len(costs) + 1) / len(costs) ** 2
    return distinct
