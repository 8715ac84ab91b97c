"""What a job trains on from: the weights that its task names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .errors import TaskError
from .task import Task, task_file

__all__ = ["load_weights", "weights_file"]


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
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise TaskError(f"{where}: they are another model's: {wrong[0]}{more}. Save those of what build_model returns.")
    model.load_state_dict(state)


def weights_file(task: Task) -> Path | None:
    """The file that the task's weights lie in; None where it has none, or a function returns them."""
    return None if task.weights is None or callable(task.weights) else _beside(task)


def _beside(task: Task) -> Path:
    """Beside the task's file, where it is not absolute."""
    return (task_file(task.source).parent if task.source else Path()) / str(task.weights)


def _read(path: Path, where: str) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise TaskError(f"{where}: {path}: no such file. Name one that torch.save(model.state_dict()) wrote.") from None
    except Exception as error:  # torch has no type of its own for what it cannot read
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise TaskError(f"{where}: {path}: cannot be read as a state dict: {said}") from error


def _named(state: Any) -> str:
    if isinstance(state, Mapping):
        name, value = next((k, v) for k, v in state.items() if not isinstance(v, torch.Tensor))
        return f"a mapping whose {name!r} is {type(value).__name__}"
    return type(state).__name__
