"""Whether a dataset gives the same again: by its attributes, and by samples read twice."""

from __future__ import annotations

import hashlib
import io
import pickle
import warnings
from collections.abc import Callable, Sequence
from random import Random
from time import perf_counter, thread_time
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate

from ..errors import Caught
from ..nested import dense_parts, tensors_in
from ..randomness import alike, random_state, seed_everything, undisturbed

NUM_SAMPLES = 16
_REREAD_S = 1.0
_FEWEST_REREAD = 4
_MOST_S = 2.0
"""Longest that attributes are compared for, at each epoch."""
_MOST_BYTES = 16 * 2**20
"""Of a tensor that are all compared."""
_PYTHONS_OWN = 1 << 9
"""``Py_TPFLAGS_HEAPTYPE``: of a class that is written in Python."""
_NEVER_CHANGED = ("pyarrow",)
"""Libraries whose objects are not changed in place, and may be larger than memory."""


class Sameness:
    """A dataset as it is now, which is held against what it is later.

    What reading it changes (a counter, a file that is opened with the first sample) is no change: attributes are
    compared as they were after it was read.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None, reads: bool = True) -> None:
        """
        Args:
            dataset: map-style or iterable.
            collate: the user's, or None.
            reads: compare some samples too. Whatever their reading draws is as if it had not been.
        """
        self._dataset, self._collate = dataset, collate or default_collate
        self._reads = reads and not isinstance(dataset, IterableDataset)
        self._see()

    def _see(self) -> None:
        self._samples = self._read() if self._reads else None
        self._state, self._obstacle = _digest(self._dataset)

    def change(self) -> str | None:
        """What has changed since the last time, in words; None where nothing did."""
        samples, state = self._samples, self._state
        now, obstacle = _digest(self._dataset)
        self._see()
        if state is None or now is None:
            return f"its attributes cannot be compared ({obstacle or self._obstacle})"
        if state != now:
            return "its attributes have changed"
        if samples is None or self._samples is None:
            return None
        same = all(same_tensors(one, other) for one, other in zip(samples, self._samples, strict=True))
        return None if same else "its samples have changed"

    def _read(self) -> list[list[torch.Tensor]] | None:
        """Some of its samples, under fixed seeds; None where one alone cannot be read."""
        found = []
        with undisturbed(), Caught() as raised:  # a user's dataset may raise anything at an index that no sampler gives
            for number, index in enumerate(spread(len(self._dataset), _FEWEST_REREAD)):
                seed_everything(number)
                found.append([tensor.clone() for tensor in tensors_in(self._collate([self._dataset[index]]))])
        return found if raised.error is None else None


def mixed(length: int) -> list[int]:
    """Up to 16 indices of a dataset, the first and the last among them, in shuffled order."""
    places = spread(length, NUM_SAMPLES)
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(0))
    return [places[k] for k in order.tolist()]


def reads_alike(dataset: Any, collate: Callable[[list[Any]], Any], indices: Sequence[int] | None = None) -> bool:
    """Whether samples collated under two states of the random generators agree, and none draws from them: what comes
    next would draw other numbers without it.

    Sixteen of them, since an augmentation that flips a coin agrees by chance half the time; four, where reading takes
    more than a second.

    Args:
        dataset: map-style.
        collate: of a list of samples.
        indices: to read; None takes them from all of it.
    """
    began_s = perf_counter()
    for count, index in enumerate(mixed(len(dataset)) if indices is None else indices):
        if count >= _FEWEST_REREAD and perf_counter() - began_s > _REREAD_S:
            break
        reads = []
        for seed in (1, 2):
            seed_everything(seed + 2 * count)
            before = random_state()
            reads.append(list(tensors_in(collate([dataset[index]]))))
            if not alike(before, random_state()):
                return False
        if not same_tensors(*reads):
            return False
    return True


def spread(length: int, count: int) -> list[int]:
    """So many indices of a dataset, the first and the last among them."""
    count = min(count, length)
    return sorted({round(k * (length - 1) / max(1, count - 1)) for k in range(count)})


def same_tensors(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    """Whether two samples hold the same; NaN is the same as NaN."""
    return len(left) == len(right) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.layout == b.layout and _same_content(a, b)
        for a, b in zip(left, right, strict=True)
    )


def _same_content(a: torch.Tensor, b: torch.Tensor) -> bool:
    if len(dense_parts(a)) > 1:
        return same_tensors(dense_parts(a), dense_parts(b))
    return bool(((a == b) | (a.ne(a) & b.ne(b))).all())


def _digest(dataset: Any) -> tuple[str | None, str]:
    """Of a dataset's attributes, theirs (the datasets that it wraps, transforms, lists, arrays), and so on; None and
    why, where one of them is no data (a file, a lock), or they are too many to be compared at each epoch."""
    hashing = _Hashing()
    with Caught() as raised:  # what cannot be pickled raises what its class likes
        _Walk(hashing, protocol=5).dump(dataset)
    if (error := raised.error) is not None:
        return None, str(error).partition("\n")[0] or type(error).__name__
    return hashing.found.hexdigest(), ""


class _Hashing(io.RawIOBase):
    """A file that keeps a hash of what is written, for so long."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self._until_s = hashlib.blake2b(digest_size=16), thread_time() + _MOST_S

    def write(self, part: Any) -> int:
        if thread_time() > self._until_s:
            raise TimeoutError(f"reading them takes more than {_MOST_S:.0f} s")
        view = memoryview(part)
        self.found.update(view)
        return view.nbytes


class _Walk(pickle.Pickler):
    """Writes what an object is made of. A class's own word on how it is pickled is not asked: it may leave some out."""

    def reducer_override(self, found: Any) -> Any:
        cls = type(found)
        if found is str:  # which all below are written as
            return NotImplemented
        if isinstance(found, type | ModuleType | BuiltinFunctionType):
            return str, (f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', found)} {id(found)}",)
        if isinstance(found, FunctionType):
            cells = tuple(_held(cell) for cell in found.__closure__ or ())
            return str, (f"function {id(found.__code__)}",), (cells, found.__defaults__, found.__kwdefaults__)
        if isinstance(found, MethodType):
            return str, (f"method {id(found.__func__)}",), (found.__self__,)
        if isinstance(found, torch.Tensor):
            return str, (f"{found.dtype} {found.device} {found._version}",), _content(found)
        if isinstance(found, Random):
            return str, ("random",), found.getstate()
        if cls.__module__ == "numpy" and cls.__name__ == "ndarray" and found.dtype != object:
            return str, (f"{found.dtype} {found.__array_interface__['data'][0]}",), _content(_of_numpy(found))
        if isinstance(found, torch.Generator):
            return str, ("generator",), found.get_state().numpy().tobytes()
        if cls.__module__.partition(".")[0] in _NEVER_CHANGED:
            return str, (f"{cls.__qualname__} {id(found)}",)
        if cls.__flags__ & _PYTHONS_OWN and hasattr(found, "__dict__") and not isinstance(found, _BUILT_IN):
            slots = {name: getattr(found, name, None) for one in cls.__mro__ for name in _slots(one)}
            return str, (f"{cls.__module__}.{cls.__qualname__}",), (vars(found), slots)
        return NotImplemented


_BUILT_IN = (list, dict, set, frozenset, tuple, str, bytes, int, float, BaseException)


def _slots(cls: type) -> tuple[str, ...]:
    found = vars(cls).get("__slots__", ())
    names = (found,) if isinstance(found, str) else tuple(found)
    return tuple(name for name in names if not name.startswith("__"))


def _held(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _content(tensor: torch.Tensor) -> Any:
    """All of it, or of a large one what is there at many places; its version tells of what torch writes into it."""
    if tensor.layout is not torch.strided and len(parts := dense_parts(tensor)) > 1:
        return tuple(tensor.shape), [_content(part) for part in parts]
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return tuple(tensor.shape), tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)
    flat = tensor.detach().reshape(-1) if tensor.numel() * tensor.element_size() <= _MOST_BYTES else _at_places(tensor)
    return tuple(tensor.shape), flat.contiguous().view(torch.uint8).numpy().tobytes()


def _of_numpy(array: Any) -> torch.Tensor:
    """Its bytes."""
    whole = array if array.flags["C_CONTIGUOUS"] else array.copy()
    with warnings.catch_warnings():  # of one that may not be written to
        warnings.simplefilter("ignore")
        return torch.from_numpy(whole.reshape(-1).view("uint8"))


def _at_places(tensor: torch.Tensor) -> torch.Tensor:
    places = torch.linspace(0, tensor.numel() - 1, _MOST_BYTES // 16, dtype=torch.float64).long()
    return tensor.detach().take(places)
