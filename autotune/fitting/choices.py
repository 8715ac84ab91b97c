"""What ``autotune.fit`` chooses from."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import SpaceError
from ..search_spaces import SearchSpace
from ..techniques import TECHNIQUES, Facts, Settings, Technique
from ..techniques.checkpointing import Checkpointing
from .whole_batch import WHOLE

Techniques = Iterable[str] | Mapping[str, Any]
"""Names of techniques, or choices of each as a search space has them."""


def combinations_of(
    techniques: Techniques | None, facts: Facts, has_optimizer: bool
) -> tuple[tuple[Settings, ...], bool]:
    """What is chosen from, the job as it stands first; and whether blocks are recomputed as it takes.

    Raises:
        SpaceError: an unknown technique or value, or one that is not fit's to change.
    """
    rows = _rows(techniques)
    for name in rows:
        if (kind := TECHNIQUES.get(name)) is not None and not is_of_step(kind):
            raise SpaceError(
                f"fit: techniques: it changes a model and its optimizer, and not what is computed or fed to it, but "
                f"got {name}. Use some of: {', '.join(one for one in TECHNIQUES if is_of_step(TECHNIQUES[one]))}."
            )
    choices = SearchSpace.of(rows, "fit: techniques").choices(facts)
    found = []
    for name, row in choices.items():
        exact = [one for one in row if one.exactness(facts) == "exact"]
        if rows[name] == "auto" and len(exact) > 1:
            row = tuple(exact)
        found.append([one for one in row if not one.frees_gradients or (has_optimizer and techniques is not None)])
    blocks = choices.get(Checkpointing.name, ())
    others = [row for row in found if row and row[0].name != Checkpointing.name]
    together = (Settings(**{one.name: one for one in chosen}) for chosen in itertools.product(*others))
    goes = (one for one in together if one.having(WHOLE).conflict() is None)
    return tuple(dict.fromkeys([Settings(), *goes])), any(one != Checkpointing() for one in blocks)


def _rows(techniques: Techniques | None) -> dict[str, Any]:
    if techniques is None:
        return {name: "auto" for name, one in TECHNIQUES.items() if one.trades_time and is_of_step(one)}
    if isinstance(techniques, Mapping):
        return dict(techniques)
    return dict.fromkeys([techniques] if isinstance(techniques, str) else techniques, "auto")


def is_of_step(kind: type[Technique]) -> bool:
    """Whether it changes a step's tensors, and neither its samples nor what is computed."""
    return "tensors" in kind.affects and not kind.affects & {"function", "samples"}
