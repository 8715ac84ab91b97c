"""What a block saves for backward, in a file until backward asks for it."""

from __future__ import annotations

import functools
import itertools
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .unnamed_file import UnnamedFile, bytes_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_LEAST_BYTES = 2**16
"""Of a tensor that is worth a write and a read."""
_MOST_TIMES = 2
"""A storage is kept whole where it is at most so many times what is saved of it."""


def offloaded(forward: Any, disk: Disk, block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """What a block's forward returns, of which what is saved for backward goes to a file.

    Its parameters and buffers stay where they are, and so does what is small. Where the plan recomputes the block, what
    is saved is what it was given.

    Args:
        forward: its own.
        disk: where to.
        block: whose it is.
        args: what it is given, as its caller gives it.
        kwargs: the same by name.
    """
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    kept = {one.untyped_storage()._cdata for one in itertools.chain(block.parameters(), block.buffers())}
    with saved_tensors_hooks(disk.saving(kept), _unpacked):
        return forward(*args, **kwargs)


class Disk:
    """Where blocks save: one file in each process. A copy of a model has another."""

    def __init__(self) -> None:
        self._file: UnnamedFile | None = None
        self._known: dict[Any, weakref.ref[_Saved]] = {}
        """By storage and its version, what was written of it and is waited for."""

    def __reduce__(self) -> tuple[type[Disk], tuple[()]]:
        return Disk, ()

    def saving(self, kept: set[int]) -> Callable[[Tensor], Any]:
        """What packs a tensor that is saved.

        Args:
            kept: addresses of storages that stay.
        """

        def pack(tensor: Tensor) -> Any:
            num_bytes = tensor.numel() * tensor.element_size()
            is_here = tensor.device.type == "cpu" and tensor.layout is _strided() and type(tensor) in _plain()
            if num_bytes < _LEAST_BYTES or not is_here or tensor.untyped_storage()._cdata in kept:
                return _Here(tensor.detach(), tensor._version)
            tensor = tensor.resolve_conj().resolve_neg()
            room = tensor.untyped_storage().nbytes()
            if room > _MOST_TIMES * num_bytes or room % tensor.element_size():
                tensor = tensor.contiguous()
            return _View(self._saved(tensor), tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())

        return pack

    def _saved(self, tensor: Tensor) -> _Saved:
        """Of a storage that several operations save, one copy. Its key refers weakly to the storage, whose address is
        not another's as long as that is there."""
        from torch.multiprocessing.reductions import StorageWeakRef

        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage), tensor._version  # type: ignore[no-untyped-call]
        known = self._known.get(key)
        found = known() if known is not None else None
        if found is None:
            found = _Fake(storage.nbytes()) if _is_fake(tensor) else _OnDisk(self._own_file(), storage)
            self._known = {one: ref for one, ref in self._known.items() if ref() is not None}
            self._known[key] = weakref.ref(found)
        return found

    def _own_file(self) -> UnnamedFile:
        """This process's: one that was forked shares its parent's, and both would write to one place."""
        if self._file is None or self._file.pid != os.getpid():
            self._file = UnnamedFile()
        return self._file


class _Saved:
    """The content of a storage, which is had again while anybody has it."""

    def __init__(self) -> None:
        self._restored: weakref.ref[Tensor] | None = None

    def restored(self) -> Tensor:
        """(bytes,) of uint8."""
        found = self._restored() if self._restored is not None else None
        if found is None:
            found = self._read()
            self._restored = weakref.ref(found)
        return found

    def _read(self) -> Tensor:
        raise NotImplementedError


class _OnDisk(_Saved):
    def __init__(self, file: UnnamedFile, storage: torch.UntypedStorage) -> None:
        super().__init__()
        self._num_bytes = storage.nbytes()
        place = file.write(bytes_of(_of(storage)))
        self._read_into = functools.partial(file.read, place=place)
        weakref.finalize(self, file.give_back, place, self._num_bytes)

    def _read(self) -> Tensor:
        import torch

        found = torch.empty(self._num_bytes, dtype=torch.uint8)
        self._read_into(bytes_of(found))
        return found


class _Fake(_Saved):
    """Of a tensor without values."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self._num_bytes = num_bytes

    def _read(self) -> Tensor:
        import torch

        return torch.empty(self._num_bytes, dtype=torch.uint8)


class _View:
    """A saved tensor."""

    def __init__(self, saved: _Saved, dtype: torch.dtype, offset: Any, size: torch.Size, stride: Any) -> None:
        self._saved, self._dtype = saved, dtype
        self._offset, self._size, self._stride = offset, size, stride

    def tensor(self) -> Tensor:
        """As it was."""
        found = self._saved.restored().view(self._dtype)
        return found.as_strided(self._size, self._stride, self._offset)


class _Here:
    """A saved tensor that stays. It is detached: one with the graph behind it would hold that for good where backward
    never comes to it."""

    def __init__(self, tensor: Tensor, version: int) -> None:
        self._tensor, self._version = tensor, version

    def tensor(self) -> Tensor:
        """As it was.

        Raises:
            RuntimeError: it was changed since, as torch says it.
        """
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tuple(self._tensor.shape)} is at version {self._tensor._version}; expected version {self._version} "
                "instead."
            )
        return self._tensor


def _unpacked(packed: _View | _Here) -> Tensor:
    return packed.tensor()


def _of(storage: torch.UntypedStorage) -> Tensor:
    import torch

    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _strided() -> torch.layout:
    import torch

    return torch.strided


def _plain() -> tuple[type[Tensor], ...]:
    """Classes of tensors that are their numbers."""
    import torch

    from ....internals.fake_tensors import FakeTensor

    return torch.Tensor, torch.nn.Parameter, FakeTensor


def _is_fake(tensor: Tensor) -> bool:
    from ....internals.fake_tensors import FakeTensor

    return isinstance(tensor, FakeTensor)
