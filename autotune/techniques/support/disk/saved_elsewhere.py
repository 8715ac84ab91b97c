"""What a block saves for backward, elsewhere until backward asks for it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_LEAST_BYTES = 2**16
"""Of a tensor that is worth a write and a read."""
_MOST_TIMES = 2
"""A storage is kept whole where it is at most so many times what is saved of it."""


def offloaded(forward: Any, place: Place, block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """What a block's forward returns, of which what is saved for backward goes elsewhere.

    Its parameters and buffers stay where they are, and so does what is small. Where the plan recomputes the block, what
    is saved is what it was given.

    Args:
        forward: its own.
        place: where to.
        block: whose it is.
        args: what it is given, as its caller gives it.
        kwargs: the same by name.
    """
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    with saved_tensors_hooks(place.saving(block), _unpacked):
        return forward(*args, **kwargs)


class Place:
    """Where blocks save. A copy of a model has another."""

    def __init__(self) -> None:
        self._known: dict[Any, weakref.ref[Saved]] = {}
        """By storage and its version, what was taken of it and is waited for."""

    def __reduce__(self) -> Any:
        return type(self), ()

    def saving(self, block: nn.Module) -> Callable[[Tensor], Any]:
        """What packs a tensor that is saved in a forward of a block, whose own parameters and buffers stay."""
        kept = {one.untyped_storage()._cdata for one in itertools.chain(block.parameters(), block.buffers())}
        come_to = self._begin()

        def pack(tensor: Tensor) -> Any:
            num_bytes = tensor.numel() * tensor.element_size()
            is_ours = self._takes(tensor) and tensor.layout is _strided() and type(tensor) in _plain()
            if num_bytes < _LEAST_BYTES or not is_ours or tensor.untyped_storage()._cdata in kept:
                return _Here(tensor.detach(), tensor._version)
            tensor = tensor.resolve_conj().resolve_neg()
            room = tensor.untyped_storage().nbytes()
            if room > _MOST_TIMES * num_bytes or room % tensor.element_size():
                tensor = tensor.contiguous()
            saved = self._saved(tensor)
            return _View(saved, come_to, tensor)

        return pack

    def _begin(self) -> Callable[[], None]:
        """A block's forward begins; what is called whenever backward comes to something that it saved."""
        return _nothing

    def _takes(self, tensor: Tensor) -> bool:
        """Whether it lies where others are taken from."""
        raise NotImplementedError

    def _take(self, tensor: Tensor) -> Saved:
        """The content of its storage."""
        raise NotImplementedError

    def _saved(self, tensor: Tensor) -> Saved:
        """Of a storage that several operations save, one copy. Its key refers weakly to the storage, whose address is
        not another's as long as that is there."""
        from torch.multiprocessing.reductions import StorageWeakRef

        key = StorageWeakRef(tensor.untyped_storage()), tensor._version  # type: ignore[no-untyped-call]
        known = self._known.get(key)
        found = known() if known is not None else None
        if found is None:
            found = self._take(tensor)
            self._known = {one: ref for one, ref in self._known.items() if ref() is not None}
            self._known[key] = weakref.ref(found)
        return found


def _nothing() -> None:
    """What is there only once it is asked for."""


class Saved:
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


class Fake(Saved):
    """Of a tensor without values."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self._num_bytes = num_bytes

    def _read(self) -> Tensor:
        import torch

        return torch.empty(self._num_bytes, dtype=torch.uint8)


class _View:
    """A saved tensor."""

    def __init__(self, saved: Saved, come_to: Callable[[], None], tensor: Tensor) -> None:
        self._saved, self._come_to, self._dtype = saved, come_to, tensor.dtype
        self._offset, self._size, self._stride = tensor.storage_offset(), tensor.size(), tensor.stride()

    def tensor(self) -> Tensor:
        """As it was."""
        self._come_to()
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
        check_version(self._tensor, self._tensor._version, self._version)
        return self._tensor


def check_version(tensor: Tensor, found: int, version: int) -> None:
    """
    Raises:
        RuntimeError: it was changed since, as torch says it.
    """
    if found != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{tuple(tensor.shape)} is at version {found}; expected version {version} instead."
        )


def _unpacked(packed: _View | _Here) -> Tensor:
    return packed.tensor()


def bytes_in(tensor: Tensor) -> Tensor:
    """(bytes,) of uint8: all of its storage. Of a fake tensor, whose storage ``set_`` would keep for good, itself."""
    import torch

    if is_fake(tensor):
        return tensor.detach()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _strided() -> torch.layout:
    import torch

    return torch.strided


def _plain() -> tuple[type[Tensor], ...]:
    """Classes of tensors that are their numbers."""
    import torch

    from ....internals.fake_tensors import FakeTensor

    return torch.Tensor, torch.nn.Parameter, FakeTensor


def is_fake(tensor: Tensor) -> bool:
    """Whether it has no values."""
    from ....internals.fake_tensors import FakeTensor

    return isinstance(tensor, FakeTensor)
