"""Checks that a saved state belongs to a training, before either is changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..errors import PlanError

_MOST_NAMES = 3
"""Differences of a kind that are told."""
_MOST_LETTERS = 80
"""Of a setting that is told: a hash has 71."""


def check_state(state: Any, own: dict[str, Any]) -> None:
    """Compare everything that has to agree.

    Args:
        state: what is to be loaded.
        own: the state of the training that is to load it.

    Raises:
        PlanError: it is no state, or one of other settings, another model, optimizer or data set.
    """
    if not isinstance(state, dict) or state.keys() != own.keys() or state["version"] != own["version"]:
        got = f"a dict of {_some([*map(str, state)])}" if isinstance(state, dict) else type(state).__name__
        raise PlanError(
            f"load_state_dict takes what Training.state_dict() of this version returned, but got {got}. "
            "A model's own state goes to training.model.load_state_dict."
        )
    for part, differences, said, remedy in _COMPARED:
        if found := [*differences(state[part], own[part])]:
            raise PlanError(f"the state {said}: {'; '.join(found)}. {remedy}")


def _settings(then: str, now: str) -> Iterator[str]:
    before, after = json.loads(then), json.loads(now)
    for name in sorted({*before, *after}):
        if (old := before.get(name)) != (new := after.get(name)):
            yield f"{name} {_told(old)} → {_told(new)}"


def _told(row: dict[str, Any] | None) -> str:
    """Without a packed record, which has a hash beside it."""
    short = {key: one for key, one in (row or {}).items() if not isinstance(one, str) or len(one) <= _MOST_LETTERS}
    return json.dumps(short or "as it stands")


def _model(then: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    if missing := [name for name in now if name not in then]:
        yield f"it lacks {_some(missing)}"
    if more := [name for name in then if name not in now]:
        yield f"it has {_some(more)} too"
    both = [(name, _kind(then[name]), _kind(now[name])) for name in now if name in then]
    if others := [f"{name} {old} → {new}" for name, old, new in both if old != new]:
        yield _some(others)


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "no tensor"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _optimizer(then: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    old, new = ([len(group["params"]) for group in one["param_groups"]] for one in (then, now))
    if old != new:
        yield f"parameters in its groups {old} → {new}"
        return
    options = {key for a, b in zip(then["param_groups"], now["param_groups"], strict=True) for key in {*a} ^ {*b}}
    if options:
        yield f"only one of them has {_some(sorted(options))}"


def _data(then: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    if then["num_samples"] != now["num_samples"]:
        yield f"samples in an epoch {then['num_samples']} → {now['num_samples']}"
    if len(then["order"]) != len(now["order"]):
        yield f"generators that the order of samples comes from {len(then['order'])} → {len(now['order'])}"


def _some(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join([*names[:_MOST_NAMES], f"{more} more"] if more > 0 else names) or "nothing"


_COMPARED: tuple[tuple[str, Callable[[Any, Any], Iterator[str]], str, str], ...] = (
    (
        "settings",
        _settings,
        "was saved under other settings",
        "Apply the plan that it was saved under. To go on with this one from the beginning of an epoch, give "
        'state["model"] and state["optimizer"] to load_state_dict of training.model and training.optimizer.',
    ),
    ("model", _model, "is of another model", "Build the model that it was saved of."),
    ("optimizer", _optimizer, "is of another optimizer", "Build the one that it was saved of."),
    ("loader", _data, "was saved over other data", "Give the same dataset and sampler."),
)
"""Parts of a state: their keys, what tells two apart, and what is said of two that differ."""
