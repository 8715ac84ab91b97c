"""``rebuild``: a model cut in place by a record of kept indices, with torch alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PlanError
from .record import Kept, Record

_MARK = "_autotune_pruning"
"""Where a pruned model has its record, packed: a string, so that the whole model is saved without this package."""


def rebuild(model: nn.Module, record: Record) -> None:
    """Cut a model as the record says. Parameters stay the objects that they are, and tied ones stay tied.

    Args:
        model: as it was before the cut that the record is of, with whatever weights of that shape.
        record: of kept indices.

    Raises:
        PlanError: the record is of another model; nothing was touched.
    """
    _check(model, record)
    tensors = tensors_of(model)
    sets = [torch.tensor(one, dtype=torch.long) for one in record.sets]
    for name in {id(tensors[name]): name for name in record.tensors}.values():
        tensor, value = tensors[name], tensors[name].detach()
        for dim, number in enumerate(record.tensors[name].sets):
            if number is not None:
                value = value.index_select(dim, sets[number].to(value.device))
        tensor.grad = None
        tensor.data = value
    for path, changes in record.attributes.items():
        module = model.get_submodule(path)
        for key, (_, after) in changes.items():
            setattr(module, key, type(getattr(module, key))(after) if isinstance(after, list) else after)
    setattr(model, _MARK, record.packed())


def pruned_by(model: nn.Module) -> str | None:
    """The packed record of the cut that was made in a model, or in one that it is around; None where there is none."""
    return next((vars(module)[_MARK] for module in model.modules() if _MARK in vars(module)), None)


def check_whole(model: nn.Module) -> None:
    """
    Raises:
        PlanError: the model is pruned.
    """
    if pruned_by(model) is not None:
        raise PlanError("settings.pruning: the model is pruned already, which cannot be taken back. Build it anew.")


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by every name that they have."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def signature(model: nn.Module) -> str:
    """Hash of names, shapes and ties of a model's tensors, which is the same for all weights of it."""
    names: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in tensors_of(model).items():
        names.setdefault(id(tensor), (tensor, []))[1].append(name)
    text = json.dumps(sorted([sorted(said), list(tensor.shape)] for tensor, said in names.values()))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def record_of(before: nn.Module, tagged: nn.Module, after: Mapping[str, nn.Module]) -> Record:
    """The record of a cut that was made in a twin whose tensors held their own flat indices.

    Args:
        before: the model as it was.
        tagged: the twin, cut; its tensors' values are places in ``before``'s.
        after: modules of the twin by path, with attributes as they ended up.

    Raises:
        ValueError: what a tensor keeps is no choice of indices in each of its dimensions, or tied tensors differ.
    """
    sets: dict[tuple[int, ...], int] = {}
    twins = tensors_of(tagged)
    tensors: dict[str, Kept] = {}
    done: dict[int, tuple[int | None, ...]] = {}
    for name, tensor in tensors_of(before).items():
        kept = _kept(tensor.shape, twins[name].detach()) if twins[name].numel() != tensor.numel() else None
        places = tuple(one if one is None else sets.setdefault(one, len(sets)) for one in kept or tensor.dim() * [None])
        if done.setdefault(id(tensor), places) != places:
            raise ValueError(f"{name} is shared with another module, and the two were cut in different places")
        if kept is not None:
            tensors[name] = Kept(tuple(tensor.shape), places)
    attributes = {name: found for name, module in before.named_modules() if (found := _changes(module, after[name]))}
    return Record(signature(before), tuple(sets), tensors, attributes)


def _kept(shape: torch.Size, places: Tensor) -> tuple[tuple[int, ...] | None, ...]:
    flat = places.flatten().long().sort().values
    indices = [torch.unique(one) for one in torch.unravel_index(flat, shape)]
    if flat.numel() != torch.tensor([len(one) for one in indices]).prod():
        raise ValueError(f"what is kept of a tensor of shape {list(shape)} is no choice of indices in each dimension")
    pairs = zip(indices, shape, strict=True)
    return tuple(None if len(one) == size else tuple(one.tolist()) for one, size in pairs)


def _changes(before: nn.Module, after: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Plain attributes that differ, but for the mode."""
    known, now = vars(before), vars(after)
    return {
        key: (_plain(value), _plain(now[key]))
        for key, value in known.items()
        if key != "training"
        and key in now
        and (_is_plain(value) and _is_plain(now[key]))
        and _plain(value) != _plain(now[key])
    }


def _is_plain(value: Any) -> bool:
    whole = isinstance(value, (tuple, list)) and all(map(_is_plain, value))
    return whole or value is None or isinstance(value, (bool, int, float, str))


def _plain(value: Any) -> Any:
    return [*map(_plain, value)] if isinstance(value, (tuple, list)) else value


def _check(model: nn.Module, record: Record) -> None:
    check_whole(model)
    if signature(model) != record.model:
        raise PlanError(
            f"settings.pruning.record: it was made of another model: {next(_differences(model, record))}. Give the "
            "model that the plan was found for, with weights of its shapes, or leave record out to cut anew."
        )
    try:
        for path, changes in record.attributes.items():
            for key, (before, _) in changes.items():
                if _plain(found := getattr(model.get_submodule(path), key)) != before:
                    raise AttributeError(f"{path}.{key}: {before} was expected, but got {found}")
    except AttributeError as error:
        raise PlanError(f"settings.pruning.record: it was made of another model: {error}.") from None


def _differences(model: nn.Module, record: Record) -> Iterator[str]:
    tensors = tensors_of(model)
    for name, kept in record.tensors.items():
        if name not in tensors:
            yield f"this one has no {name}"
        elif tuple(tensors[name].shape) != kept.shape:
            yield f"{name}: shape {list(kept.shape)} was expected, but got {list(tensors[name].shape)}"
    yield "tensors that it does not cut have other names, shapes or ties"
