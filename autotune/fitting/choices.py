"""What ``autotune.fit`` chooses from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import SpaceError
from ..estimates import Cheapest, CheapestOptions
from ..plan import Budget
from ..search_spaces import SearchSpace
from ..techniques import TECHNIQUES, Facts, Settings, Stage, Technique
from ..techniques.batch import Batch
from ..techniques.checkpointing import Checkpointing
from ..units import MIB, ceil_mib, format_bytes, size
from ..words import settings_words
from .fitted import left_out, what_binds

_GROWS = 16 * MIB
"""What a process on a CPU may take more when it is asked again: nothing below would surely work then."""
Techniques = Iterable[str] | Mapping[str, Any]
"""Names of techniques, or choices of each as a search space has them."""


def is_of_step(kind: type[Technique]) -> bool:
    """Whether it changes a step's tensors, and neither its samples nor what is computed."""
    return "tensors" in kind.affects and not kind.affects & {"function", "samples"}


DEFAULT = tuple(name for name, one in TECHNIQUES.items() if one.trades_time and is_of_step(one))
"""Those that trade time for memory, and keep batch and function."""


def combinations_of(
    techniques: Techniques | None, facts: Facts, *, may_free: bool, batch: Batch, has_optimizer: bool = True
) -> tuple[tuple[Settings, ...], bool]:
    """What is chosen from, the job as it stands first; and whether blocks are recomputed as it takes.

    Args:
        techniques: to choose from; None is those that trade time for memory, and keep the arithmetic.
        facts: of the model and the device.
        may_free: whether gradients may be gone once backward has ended.
        batch: of the job.
        has_optimizer: whether there is one to change.

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
        if techniques is None or (rows[name] == "auto" and len(exact) > 1):
            row = tuple(exact)
        row = tuple(one for one in row if may_free or not one.frees_gradients)
        found.append([one for one in row if has_optimizer or one.stage is not Stage.OPTIMIZER or one == type(one)()])
    blocks = choices.get(Checkpointing.name, ())
    others = [row for row in found if row and row[0].name != Checkpointing.name]
    together = (Settings(**{one.name: one for one in chosen}) for chosen in itertools.product(*others))
    goes = (one for one in together if one.having(batch).conflict() is None)
    return tuple(dict.fromkeys([Settings(), *goes])), any(one != Checkpointing() for one in blocks)


def nearest_miss(found: Cheapest, options: CheapestOptions, budget: Budget, facts: Facts) -> str:
    """Why nothing fits, in words, with what would."""
    assert budget.limit is not None, "nothing is chosen without one"
    grows = 0 if budget.device == "cuda" else _GROWS
    least = ceil_mib(math.ceil(found.least.process.high * budget.factor) + grows)
    tried = {one.name for settings in (*options.combinations, found.least.settings) for one in settings.chosen()}
    tried |= {Checkpointing.name} if options.choose_blocks else set()
    trades = (one for one in TECHNIQUES.values() if is_of_step(one) and one.trades_time)
    more = [one.name for one in trades if one.name not in tried and len(one.choices(facts)) > 1]
    return (
        f"nothing fits within {size(budget.limit)}. The smallest budget that works is "
        f"{format_bytes(least)} ({settings_words(found.least.settings, facts)}); what binds there is "
        f"{what_binds(found)}. Allow that much, or take a smaller batch"
        f"{', or allow ' + ', '.join(more) if more else ''}." + "".join(f" {one}." for one in left_out(found, facts))
    )


def _rows(techniques: Techniques | None) -> dict[str, Any]:
    if techniques is None:
        return dict.fromkeys(DEFAULT, "auto")
    if isinstance(techniques, Mapping):
        return dict(techniques)
    return dict.fromkeys([techniques] if isinstance(techniques, str) else techniques, "auto")
