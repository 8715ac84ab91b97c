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
from ..techniques.allocator import INSTALLATION, Allocator
from ..techniques.batch import Batch
from ..techniques.checkpointing import Checkpointing
from ..techniques.offload import Offload
from ..units import MIB, ceil_mib, format_bytes, size
from ..words import settings_words
from .fitted import left_out, what_binds

_GROWS = 16 * MIB
"""What a process on a CPU may take more when it is asked again: nothing below would surely work then."""
_MAPS_FROM_MIB = (4, 16)
"""Sizes from which on tensors get pages of their own, beside the smallest: 4 was chosen for a SegFormer and a T5, 16
for a Gemma 2 (``benchmarks/results/fit-cpu.jsonl``)."""
Techniques = Iterable[str] | Mapping[str, Any]
"""Names of techniques, or choices of each as a search space has them."""


def is_of_step(kind: type[Technique]) -> bool:
    """Whether it changes a step's tensors or where they lie, and neither its samples nor what is computed."""
    return bool(kind.affects & {"tensors", "process"}) and not kind.affects & {"function", "samples"}


DEFAULT = tuple(
    name
    for name, one in TECHNIQUES.items()
    if is_of_step(one) and (one.trades_time or one is Allocator) and not one.only_where_listed
)
"""Those that trade time for memory, and keep batch and function."""


def combinations_of(
    techniques: Techniques | None, facts: Facts, *, may_free: bool, batch: Batch, has_optimizer: bool = True
) -> tuple[tuple[Settings, ...], tuple[Settings, ...]]:
    """What is chosen from: combinations, the job as it stands first; and what is chosen for each of them by one
    program.

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
    early = [one for one in _listed(rows.get(Allocator.name)) if one in (*INSTALLATION, "expandable_segments")]
    if early:
        raise SpaceError(
            f"fit: techniques: allocator: {early[0]} is set before a process starts, and this one runs. Use mmap on a "
            "CPU, or `autotune search`."
        )
    here = tuple(one for one in facts.allocators if one == "mmap")
    space = SearchSpace.of(rows, "fit: techniques")
    for name in rows:
        for one in _settings(getattr(space, name)):
            if isinstance(one, Offload) and one.trained:
                raise SpaceError(
                    "fit: techniques: offload: the optimizer is built, and trained puts others in the place of its "
                    "weights. Leave trained out, or use `autotune search`."
                )
            if one.changes_function:
                raise SpaceError(
                    f"fit: techniques: {name}: what is computed stays as it is, but got {one.describe()}. Use another "
                    "kind, or `autotune search --max-quality-drop`."
                )
    choices = space.choices(facts.model_copy(update={"allocators": here}))
    found = []
    for name, row in choices.items():
        on_host = [one for one in row if one.fills_host(facts)]
        row = tuple(one for one in row if one not in on_host)
        if techniques is not None and on_host and (rows[name] != "auto" or len(row) <= 1):
            raise SpaceError(
                f"fit: techniques: {name}: the device's memory alone is held, but got {on_host[0].describe()}, which "
                "takes the host's. Leave it out, or use `autotune search --host-budget`."
            )
        exact = [one for one in row if one.exactness(facts) == "exact"]
        if techniques is None or (rows[name] == "auto" and len(exact) > 1):
            row = tuple(exact)
        if (techniques is None or rows[name] == "auto") and Allocator(kind="mmap") in row:
            row += tuple(Allocator(kind="mmap", from_mib=size_mib) for size_mib in _MAPS_FROM_MIB)
        row = tuple(one for one in row if (may_free or not one.frees_gradients) and not one.environment())
        found.append([one for one in row if has_optimizer or one.stage is not Stage.OPTIMIZER or one == type(one)()])
    others = [row for row in found if row and row[0].adds_up is None]
    together = (Settings(**{one.name: one for one in chosen}) for chosen in itertools.product(*others))
    added = (_everywhere(one) for row in found for one in row if one.adds_up is not None)
    goes = (
        tuple(one for one in dict.fromkeys([Settings(), *every]) if one.having(batch).conflict() is None)
        for every in (together, added)
    )
    combinations, free = goes
    return combinations, free[1:]


def _settings(row: Any) -> list[Technique]:
    """Those that a row of a space lists."""
    return [one for one in row if isinstance(one, Technique)] if isinstance(row, tuple) else []


def _listed(row: Any) -> list[str]:
    """Kinds that a row of a space lists."""
    return [str(one.get("kind")) for one in row if isinstance(one, Mapping)] if isinstance(row, list | tuple) else []


def _everywhere(one: Technique) -> Settings:
    """The setting in all blocks, wherever it was to be."""
    is_some = one.name == Checkpointing.name and one != Checkpointing()
    return Settings().having(Checkpointing(kind="blocks") if is_some else one)


def _num_choices(technique: type[Technique], facts: Facts) -> int:
    return sum(not one.fills_host(facts) for one in technique.choices(facts))


def nearest_miss(found: Cheapest, options: CheapestOptions, budget: Budget, facts: Facts) -> str:
    """Why nothing fits, in words, with what would."""
    assert budget.limit is not None, "nothing is chosen without one"
    grows = 0 if budget.device == "cuda" else _GROWS
    least = ceil_mib(math.ceil(found.least.process.high * budget.factor) + grows)
    tried = {one.name for settings in (*options.combinations, *options.choices) for one in settings.chosen()}
    trades = (one for one in TECHNIQUES.values() if is_of_step(one) and one.trades_time)
    tried |= facts.left_out.keys()
    more = [one.name for one in trades if one.name not in tried and _num_choices(one, facts) > 1]
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
