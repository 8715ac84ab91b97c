"""Whether two recorded trainings are the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .plans import Pair

_OF_OTHER_DRAWS = 0.4
"""Where random numbers are others: largest difference of all losses' sum, and of all gradients' norms, as a share. What
is not divided by the number of passes is twice as large at least."""
_DISTINCT = 0.2
"""The same of the number of distinct samples, which augmentation may draw twice."""
_NORM = 10
"""A gradient's tolerance over its loss's."""
_SMALL = 0.1
"""A loss is held against at least this share of the mean of all."""


def differences(plain: dict[str, Any], planned: dict[str, Any], pair: Pair) -> Iterator[str]:
    """What differs more than the pair's technique may have it.

    Args:
        plain: as the recorder wrote it, of the script alone.
        planned: of the same with the plan.
        pair: what to allow.

    Yields:
        A line for each thing that differs, with where it first does.
    """
    yield from _first("optimizer steps", *(_names(one) for one in (plain, planned)))
    expected = [pair.split * len(step["losses"]) for step in plain["steps"]]
    yield from _first("backward passes", expected, [len(step["losses"]) for step in planned["steps"]])
    yield from _first("learning rates", *([step["rates"] for step in one["steps"]] for one in (plain, planned)))
    if pair.draws_alike:
        yield from _first("samples", *(_samples(one) for one in (plain, planned)))
        yield from _far(plain, planned, pair.tolerance)
    else:
        yield from _first("samples of an epoch", *(_sizes(one) for one in (plain, planned)))
        yield from _fewer(plain, planned)
        yield from _apart(plain, planned)
    if pair.split == 1:  # a loader that is a batch ahead is half a batch ahead of a split one
        yield from _first("samples of a step", *(_drawn(one) for one in (plain, planned)))
    if pair.draws_alike and pair.split == 1 and pair.technique != "compile":
        yield from _first(
            "random numbers drawn", *([s["generators"] for s in one["steps"]] for one in (plain, planned))
        )


def _first(what: str, plain: Sequence[Any], planned: Sequence[Any]) -> Iterator[str]:
    if plain == planned:
        return
    place = next((n for n, (a, b) in enumerate(zip(plain, planned, strict=False)) if a != b), None)
    if place is None:
        yield f"{what}: {len(planned)} in place of {len(plain)}"
    else:
        yield f"{what}: at {place} of {len(plain)} {planned[place]} in place of {plain[place]}"


def _names(record: dict[str, Any]) -> list[str]:
    return [f"{step['class']} {step['optimizer']}" for step in record["steps"]]


def _samples(record: dict[str, Any]) -> list[tuple[int, int, str]]:
    """In order, each with its epoch and its loader, for whatever batches they came in."""
    return [
        (number, epoch["loader"], row)
        for number, epoch in enumerate(record["epochs"])
        for batch in epoch["batches"]
        for row in batch
    ]


def _sizes(record: dict[str, Any]) -> list[tuple[int, int]]:
    return [(epoch["loader"], sum(map(len, epoch["batches"]))) for epoch in record["epochs"]]


def _drawn(record: dict[str, Any]) -> list[list[int]]:
    """Of each loader, by each step."""
    return [step["drawn"] for step in record["steps"]]


def _fewer(plain: dict[str, Any], planned: dict[str, Any]) -> Iterator[str]:
    for loader in sorted({epoch["loader"] for epoch in plain["epochs"]}):
        own, got = (len({row for _, of, row in _samples(one) if of == loader}) for one in (plain, planned))
        if abs(got - own) > _DISTINCT * own:
            yield f"distinct samples of loader {loader}: {got} in place of {own}"


def _losses(record: dict[str, Any]) -> list[float]:
    """Of each step, the sum over its backward passes."""
    return [sum(loss or 0.0 for loss in step["losses"]) for step in record["steps"]]


def _norms(record: dict[str, Any]) -> list[float]:
    return [step["norm"] for step in record["steps"]]


def _far(plain: dict[str, Any], planned: dict[str, Any], tolerance: float) -> Iterator[str]:
    for what, read, allowed in (("loss", _losses, tolerance), ("gradient norm", _norms, _NORM * tolerance)):
        own, got = read(plain), read(planned)
        least = _SMALL * sum(map(abs, own)) / max(1, len(own))
        for place, (a, b) in enumerate(zip(own, got, strict=False)):
            if not abs(b - a) <= allowed * max(abs(a), least):
                yield f"{what}: {b:.6g} in place of {a:.6g} at step {place + 1} of {len(own)}"
                break


def _apart(plain: dict[str, Any], planned: dict[str, Any]) -> Iterator[str]:
    for what, read in (("losses", _losses), ("gradient norms", _norms)):
        own, got = (sum(read(one)) for one in (plain, planned))
        if not abs(got - own) <= _OF_OTHER_DRAWS * abs(own):
            yield f"sum of {what}: {got:.4g} in place of {own:.4g}"
