"""Loads the weights that training starts from: the task's, or a plan's recovered ones."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import PlanError, TaskError
from ..files import hash_of, replacing
from ..plan import KeptWeights
from ..task import Task
from ..task_file import task_file


def load_weights(task: Task, model: nn.Module) -> None:
    """Load the task's ``weights`` into its model; a task without any leaves it as it is.

    Raises:
        TaskError: there is no such file, it holds no state dict, or its tensors are not the model's.
    """
    if task.weights is None:
        return
    where = f"{task.source or 'task'}: weights"
    state = task.weights() if callable(task.weights) else _read(_beside(task), where)
    if not isinstance(state, Mapping) or not all(isinstance(one, torch.Tensor) for one in state.values()):
        raise TaskError(f"{where}: a state dict (names to tensors) was wanted, but got {_named(state)}.")
    if (wrong := _misfit(state, model)) is not None:
        raise TaskError(f"{where}: they are another model's: {wrong}. Save those of what build_model returns.")
    model.load_state_dict(state)


def save_kept(model: nn.Module, path: Path) -> None:
    """Write what recovery made of a model, whole or not at all.

    Raises:
        PlanError: the path cannot be written.
        OSError, RuntimeError: the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, PlanError, "--keep-weights") as temporary:
        torch.save(model.state_dict(), temporary)


def load_kept(kept: KeptWeights, model: nn.Module) -> None:
    """Load the weights that lie beside a plan into the model that the plan made.

    Raises:
        PlanError: they are not there, were edited, or are another model's.
    """
    otherwise = "or leave weights out of the plan, to train on from the task's own"
    if kept.path is None:
        raise PlanError(
            f"weights: the plan goes on from {kept.file}, which is not here. Read the plan with "
            f"autotune.load_plan(path), which looks for it next to the file; {otherwise}."
        )
    path = Path(kept.path)
    try:
        found = hash_of(path)
    except OSError as error:
        raise PlanError(
            f"{path}: the plan's weights cannot be read: {error.strerror}. Copy them next to the plan; {otherwise}."
        ) from None
    if found != kept.hash:
        raise PlanError(
            f"{path}: these are not the weights that the plan was saved with: their hash is {found[:19]}…, and "
            f"weights.hash {kept.hash[:19]}…. Copy those that the search wrote next to the plan; {otherwise}."
        )
    state = torch.load(path, map_location="cpu", weights_only=True)
    if (wrong := _misfit(state, model)) is not None:
        raise PlanError(f"{path}: the plan's weights are another model's: {wrong}. Search again, {otherwise}.")
    model.load_state_dict(state)


def _misfit(state: Mapping[str, torch.Tensor], model: nn.Module) -> str | None:
    """What of these tensors is not the model's, in words; None where all are."""
    own = model.state_dict()
    wrong = [
        *(f"{name} is missing" for name in own if name not in state),
        *(f"{name} is not in the model" for name in state if name not in own),
        *(
            f"{name} is {tuple(state[name].shape)}, but the model's is {tuple(own[name].shape)}"
            for name in own
            if name in state and state[name].shape != own[name].shape
        ),
    ]
    more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"{wrong[0]}{more}" if wrong else None


def weights_file(task: Task) -> Path | None:
    """The file that the task's weights lie in; None where it has none, or a function returns them."""
    return None if task.weights is None or callable(task.weights) else _beside(task)


def _beside(task: Task) -> Path:
    """Beside the task's file, where it is not absolute."""
    return (task_file(task.source).parent if task.source else Path()) / str(task.weights)


_UNREADABLE = (
    OSError, EOFError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, struct.error,
    pickle.PickleError,
)  # fmt: skip
"""What torch and pickle raise at bytes that are no state dict: torch has no type of its own for that."""


def _read(path: Path, where: str) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise TaskError(f"{where}: {path}: no such file. Name one that torch.save(model.state_dict()) wrote.") from None
    except _UNREADABLE as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise TaskError(f"{where}: {path}: cannot be read as a state dict: {said}") from error


def _named(state: Any) -> str:
    if isinstance(state, Mapping):
        name, value = next((k, v) for k, v in state.items() if not isinstance(v, torch.Tensor))
        return f"a mapping whose {name!r} is {type(value).__name__}"
    return type(state).__name__
