"""Data loading: worker processes, prefetching, pinning, and an epoch kept in host or device memory."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from ..errors import PlanError
from .support.base import Effect, FileKind, LoaderSpec, Program, Stage, Technique
from .support.facts import Facts, ScriptFacts

_CACHE_SHARE = 0.5
"""Share of the available memory that a cached epoch may take to be worth a trial."""
_GAIN = 1.1
"""A worker count is tried if the loader alone is faster by this much than with any smaller count."""
_PREFETCHES = (2, 4)


class DataLoading(Technique):
    """The DataLoader's own options, and a cache. What is left out stays as the user has it."""

    name: ClassVar[str] = "data_loading"
    goes_by: ClassVar[str | None] = "loader workers"
    stage: ClassVar[Stage] = Stage.LOADER
    affects: ClassVar[frozenset[Effect]] = frozenset({"loader"})

    num_workers: NonNegativeInt | None = Field(default=None, le=1024)
    """Loader worker processes, at most 1024; 0 loads in the training process."""
    prefetch_factor: PositiveInt | None = Field(default=None, le=1024)
    """Batches that each worker holds ready, at most 1024: torch asks for all of them before it returns the first."""
    pin_memory: bool | None = None
    """Load into page-locked memory, from which the copy to a CUDA device is queued behind what that computes, and the
    host goes on; from other memory the host waits for it."""
    persistent_workers: bool | None = None
    """Keep workers between epochs."""
    cache: Literal["none", "host", "device"] = "none"
    """Read the dataset once, when training starts, and keep it in host or device memory."""

    @model_validator(mode="after")
    def _check_workers(self) -> DataLoading:
        if self.num_workers == 0 and (self.prefetch_factor or self.persistent_workers):
            raise ValueError("num_workers: prefetch_factor and persistent_workers need at least 1 worker, but got 0")
        if self.cache != "none" and self.num_workers:
            raise ValueError(f"num_workers: a cached epoch needs no workers, but got {self.num_workers}. Use 0.")
        return self

    def describe(self, facts: Facts | None = None) -> str:
        """``2 loader workers (prefetch 2, pinned)``."""
        details = [f"prefetch {self.prefetch_factor}"] if self.prefetch_factor is not None else []
        details += [
            word for word, chosen in (("pinned", self.pin_memory), ("persistent", self.persistent_workers)) if chosen
        ]
        what = f"epoch cached in {self.cache} memory"
        if self.cache == "none":
            workers = f"{self.num_workers} loader worker{'' if self.num_workers == 1 else 's'}"
            what = "loader" if self.num_workers is None else workers
        return f"{what} ({', '.join(details)})" if details else what

    def purpose(self) -> str:
        """Of workers, or of the cache."""
        if self.cache == "none":
            return "How many processes load data beside the training, and how far ahead."
        where = "in host memory" if self.cache == "host" else "on the device"
        return f"Reads the dataset once, when training starts, and keeps it {where}."

    @classmethod
    def choices(cls, facts: Facts) -> tuple[DataLoading, ...]:
        """The user's own, a cached epoch where it fits, and the worker counts that the loader alone gains from."""
        pin = True if facts.device.type == "cuda" and not facts.samples_on_device else None
        caches = (cls(num_workers=0, cache="device"), cls(num_workers=0, pin_memory=pin, cache="host"))
        found = [cls(), *(choice for choice in caches if choice._is_worth_trying(facts))]
        for count in _worthwhile_workers(facts):
            keeps = True if count and facts.epochs_differ is None else None
            found += [_with_workers(count, prefetch, pin, keeps) for prefetch in (_PREFETCHES if count else (None,))]
        same = _as_user_has_it(facts)
        found = [choice for choice in found if choice.unavailable(facts) is None]
        return tuple(choice for choice in found if choice == cls() or choice.model_dump() != same)

    def unavailable(self, facts: Facts) -> str | None:
        """An epoch can be cached only if reading it twice gives the same, and it fits."""
        if facts.own_loader and self != type(self)():
            return "the task builds its loaders itself (build_loader)"
        if facts.samples_on_device and (self.num_workers or self.pin_memory):
            return "the samples are on the device already: no worker process could use it, and there is nothing to pin"
        if self.cache != "none":
            return self._why_no_cache(facts)
        if self.persistent_workers and not facts.loader_options.get("persistent_workers") and facts.epochs_differ:
            return facts.epochs_differ
        workers = self.num_workers or 0
        if facts.dataset_kind == "iterable" and workers > 1 and not facts.shards_by_worker:
            return "an iterable dataset without shards_by_worker would be read once by each worker"
        if self.pin_memory and facts.device.type == "cpu":
            return "pin_memory serves copies to a CUDA device"
        return None

    def options_of(self, program: Program) -> Mapping[str, Any]:
        """timm's number of workers."""
        return {"workers": self.num_workers} if self.num_workers is not None and program == "timm" else {}

    @classmethod
    def left_to(cls, script: ScriptFacts) -> str | None:
        """It is of a DataLoader."""
        return None if script.has_loader else "the script iterates over no torch.utils.data.DataLoader"

    def not_in_file(self, kind: FileKind) -> str | None:
        """It has none."""
        return "a file reads no data"

    def on_loader(self, spec: LoaderSpec) -> LoaderSpec:
        """Change the options, and read the dataset into a cache where one is asked for.

        Raises:
            PlanError: the cache cannot hold this dataset.

        Source: https://docs.pytorch.org/docs/stable/data.html
        """
        from torch.utils.data import IterableDataset

        names = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
        chosen = {name: value for name in names if (value := getattr(self, name)) is not None}
        rests = self.cache != "none" or (self.persistent_workers and not spec.options.get("persistent_workers"))
        changed = dataclasses.replace(
            spec,
            options={**spec.options, **chosen},
            stock=spec if rests else None,
            replaced_workers=self.replaced_workers(
                spec.options.get("num_workers", 0), isinstance(spec.dataset, IterableDataset)
            ),
        )
        return changed if self.cache == "none" else _cached(changed, self.cache)

    def replaced_workers(self, own: int, is_iterable: bool) -> int:
        """Of the user's workers, those in whose place the training process reads: each of several that read an iterable
        dataset reads all of it."""
        is_read_here = self.num_workers == 0 and self.cache == "none"
        return own if is_read_here and (own == 1 or not is_iterable) else 0

    def as_predicted(self, facts: Facts) -> DataLoading:
        """By the number of workers."""
        num_workers = self._num_workers(facts)
        if facts.dataset_kind == "iterable" and not facts.shards_by_worker:
            num_workers = min(num_workers, 1)  # more would read the same samples
        return DataLoading(num_workers=num_workers or None)

    def cached_bytes(self, facts: Facts) -> int:
        """Of an epoch that is kept in the device's memory, which a CPU's host memory is."""
        kept = ("host", "device") if facts.device.type == "cpu" else ("device",)
        return (facts.dataset_bytes or 0) if self.cache in kept else 0

    def host_cached_bytes(self, facts: Facts) -> int:
        """Of an epoch in the memory of a card's host."""
        return (facts.dataset_bytes or 0) if self.cache == "host" and facts.device.type != "cpu" else 0

    def num_loading(self, facts: Facts) -> int:
        """Its workers; a cached epoch needs none."""
        return 0 if self.cache != "none" else self._num_workers(facts)

    def num_ready(self, facts: Facts) -> int:
        """torch's default is 2 for each worker."""
        own = facts.loader_options.get("prefetch_factor") or _PREFETCHES[0]
        return self.num_loading(facts) * (self.prefetch_factor or own)

    def samples_per_s(self, facts: Facts) -> float:
        """Of the loader alone; an epoch in memory is the fastest."""
        if self.cache != "none":
            return math.inf
        return facts.loader_samples_per_s.get(self._num_workers(facts), 0.0)

    def takes_processors(self, facts: Facts) -> bool:
        """Workers do, where training is on the CPU."""
        return facts.device.type == "cpu" and self._num_workers(facts) > 0

    def _num_workers(self, facts: Facts) -> int:
        own = facts.loader_options.get("num_workers", 0)
        return own if self.num_workers is None else self.num_workers

    def _is_worth_trying(self, facts: Facts) -> bool:
        """Device memory is host memory on a CPU: there, the stacked epoch is called host."""
        return self.unavailable(facts) is None and (self.cache == "host" or facts.device.type == "cuda")

    def _why_no_cache(self, facts: Facts) -> str | None:
        if facts.dataset_kind == "iterable":
            return "an iterable dataset has no fixed epoch to keep"
        if not facts.dataset_deterministic:
            return "the dataset draws random numbers or returns other values when it is read again (augmentation)"
        if facts.epochs_differ is not None:
            return facts.epochs_differ
        if self.cache == "device" and not facts.stackable:
            return "the samples do not stack to one shape"
        if self.cache == "host" and facts.samples_on_device and facts.stackable:
            return "the samples are on the device already, and so would the epoch be; cache: device is the same"
        room = facts.host_memory_bytes if self.cache == "host" else facts.device.memory_bytes
        if facts.dataset_bytes is None or facts.dataset_bytes > _CACHE_SHARE * room:
            return f"the dataset's {facts.dataset_bytes} bytes exceed half of the {self.cache} memory"
        return None


def _with_workers(count: int, prefetch: int | None, pin: bool | None, keeps: bool | None) -> DataLoading:
    return DataLoading(num_workers=count, prefetch_factor=prefetch, pin_memory=pin, persistent_workers=keeps)


def _worthwhile_workers(facts: Facts) -> Iterator[int]:
    best = 0.0
    for count, rate in sorted(facts.loader_samples_per_s.items()):
        if rate > _GAIN * best:
            best = rate
            yield count


def _as_user_has_it(facts: Facts) -> dict[str, Any]:
    own = facts.loader_options
    workers = own.get("num_workers", 0)
    prefetch = (own.get("prefetch_factor") or 2) if workers else None
    persistent = own.get("persistent_workers") or None
    pin = own.get("pin_memory") or None
    return {
        "num_workers": workers,
        "prefetch_factor": prefetch,
        "pin_memory": pin,
        "persistent_workers": persistent,
        "cache": "none",
    }


def _cached(spec: LoaderSpec, place: Literal["host", "device"]) -> LoaderSpec:
    """Read every sample once; stacked tensors where default_collate would stack them, a list of samples otherwise."""
    from torch.utils.data import IterableDataset

    if isinstance(spec.dataset, IterableDataset):
        raise PlanError("settings.data_loading.cache: an iterable dataset has no fixed epoch to keep. Use cache: none.")
    stacked = _stack(spec.dataset) if spec.collate is None else None
    if stacked is None and place == "device":
        raise PlanError("settings.data_loading.cache: the samples do not stack to one shape. Use cache: host.")
    options = {**spec.options, "num_workers": 0}
    if stacked is None:
        samples = [spec.dataset[index] for index in range(len(spec.dataset))]
        return dataclasses.replace(spec, dataset=_Kept(spec.dataset, samples), options=options)
    if place == "device":
        stacked = _map_tensors(lambda tensor: tensor.to(spec.device), stacked)
        options["pin_memory"] = False
    cache = _Stacked(spec.dataset, stacked)
    return dataclasses.replace(spec, dataset=cache, collate=_as_it_is, options=options)


class _Kept:
    """A dataset whose batches are made of samples that were read once; all else is that of the dataset itself: its
    length, its samples one by one, its methods, and what is assigned to its attributes."""

    def __init__(self, dataset: Any, samples: Any) -> None:
        vars(self).update(_autotune_dataset=dataset, _autotune_samples=samples)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_autotune_"):  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._autotune_dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._autotune_dataset, name, value)

    def __len__(self) -> int:
        return len(self._autotune_dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._autotune_dataset[index]

    def __getitems__(self, indices: list[int]) -> Any:
        return [copy.deepcopy(self._autotune_samples[index]) for index in indices]


class _Stacked(_Kept):
    """With one row a sample in nested tensors; a batch is one gather instead of a Python loop."""

    def __getitems__(self, indices: list[int]) -> Any:
        import torch

        where, device = torch.tensor(indices), _first_tensor(self._autotune_samples).device
        if device.type == "cuda":  # from other memory than page-locked, the copy waits for all that is queued
            where = where.pin_memory().to(device, non_blocking=True)
        return _map_tensors(lambda tensor: tensor[where], self._autotune_samples)


def _as_it_is(batch: Any) -> Any:
    return batch


def _stack(dataset: Any) -> Any | None:
    """All samples by default_collate, filled into place chunk by chunk; None where they do not stack."""
    from torch.utils.data import default_collate

    length, chunk = len(dataset), 256
    rows: Any = None
    try:
        for start in range(0, length, chunk):
            part = default_collate([dataset[index] for index in range(start, min(start + chunk, length))])
            if rows is None:
                rows = _map_tensors(lambda tensor: tensor.new_empty((length, *tensor.shape[1:])), part)
            _fill(rows, part, start)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return None
    return rows


def _fill(rows: Any, part: Any, start: int) -> None:
    """Raises TypeError where a chunk differs from the first in structure, shape or dtype: assigning would convert."""
    from torch.utils._pytree import tree_flatten

    (wholes, structure), (pieces, other) = tree_flatten(rows), tree_flatten(part)
    if structure != other:
        raise TypeError("samples differ in structure")
    for whole, piece in zip(wholes, pieces, strict=True):
        if whole.dtype != piece.dtype or whole.shape[1:] != piece.shape[1:]:
            raise TypeError("samples differ in dtype or shape")
        whole[start : start + len(piece)] = piece


def _first_tensor(nested: Any) -> Any:
    from torch.utils._pytree import tree_leaves

    return tree_leaves(nested)[0]


def _map_tensors(function: Any, nested: Any) -> Any:
    from torch.utils._pytree import tree_map

    return tree_map(function, nested)
