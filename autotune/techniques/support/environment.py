"""Environment variables that several techniques ask for, or one that the user has set: joined by the variable's own
rule, or a conflict aloud."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping

from ...errors import PlanError

_OLD_NAMES = {"PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF"}
"""Torch reads the new name first. Source: c10/core/AllocatorConfig.h."""
_OWN = "your environment"

_Asked = Iterable[tuple[str, str]]
"""Who asks for which value; the user's own last."""


def joined(asked: Iterable[tuple[str, Mapping[str, str]]], own: Mapping[str, str]) -> dict[str, str]:
    """The variables to set, so that everyone has what they ask for.

    ``LD_PRELOAD`` lists every library once, the user's own last. ``PYTORCH_ALLOC_CONF`` lists every option;
    ``OMP_NUM_THREADS`` is the smallest; any other variable has one value.

    Args:
        asked: names and their variables, each by who asks for them.
        own: the environment that the process starts with otherwise.

    Returns:
        The variables that were asked for, with the user's own part of each.

    Raises:
        PlanError: two values that cannot both be had.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for who, variables in asked:
        for name, value in variables.items():
            found.setdefault(_OLD_NAMES.get(name, name), []).append((who, value))
    for name, values in found.items():
        names = (name, *(old for old, new in _OLD_NAMES.items() if new == name))
        values.extend([(_OWN, own[one]) for one in names if own.get(one)][:1])
    return {name: _RULES.get(name, _one_value)(name, values) for name, values in found.items()}


def _libraries(name: str, asked: _Asked) -> str:
    """Colons or blanks lie between them. Source: ld.so(8)."""
    return ":".join(dict.fromkeys(library for _, value in asked for library in re.split(r"[:\s]+", value) if library))


def _options(name: str, asked: _Asked) -> str:
    """``key:value``, with commas between them; a value may be a list in brackets.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
    """
    found: dict[str, tuple[str, str]] = {}
    for who, value in asked:
        for option in re.split(r",(?![^\[]*\])", value):
            key = option.partition(":")[0].strip()
            if key:
                other, first = found.setdefault(key, (who, option.strip()))
                _check_equal(name, (other, first), (who, option.strip()))
    return ",".join(option for _, option in found.values())


def _one_value(name: str, asked: _Asked) -> str:
    first, *others = asked
    for other in others:
        _check_equal(name, first, other)
    return first[1]


def _check_equal(name: str, one: tuple[str, str], other: tuple[str, str]) -> None:
    if one[1] != other[1]:
        raise PlanError(
            f"{name}: {one[0]} needs {one[1]!r}, but {other[0]} has {other[1]!r}. "
            + ("Unset it there, " if other[0] == _OWN else f"Leave {other[0]} at the job's own setting, ")
            + f"or leave {one[0]} at the job's own setting."
        )


def _fewest(name: str, asked: _Asked) -> str:
    """Processes that share processors take no more threads than one who gives them fewer allows."""
    return min((value for _, value in asked), key=lambda value: int(value) if value.isdecimal() else sys.maxsize)


_RULES = {"LD_PRELOAD": _libraries, "PYTORCH_ALLOC_CONF": _options, "OMP_NUM_THREADS": _fewest}
