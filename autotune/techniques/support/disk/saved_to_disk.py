"""What blocks of a CPU's job save, in a file."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING

from .saved_elsewhere import Fake, Place, Saved, bytes_in, is_fake
from .unnamed_file import UnnamedFile, bytes_of

if TYPE_CHECKING:
    from torch import Tensor


class Disk(Place):
    """A file of this process's alone."""

    def __init__(self) -> None:
        super().__init__()
        self._file: UnnamedFile | None = None

    def _takes(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    def _take(self, tensor: Tensor) -> Saved:
        return Fake(tensor.untyped_storage().nbytes()) if is_fake(tensor) else _OnDisk(self._own_file(), tensor)

    def _own_file(self) -> UnnamedFile:
        self._file = UnnamedFile.to_write(self._file)
        return self._file


class _OnDisk(Saved):
    def __init__(self, file: UnnamedFile, tensor: Tensor) -> None:
        super().__init__()
        self._num_bytes = tensor.untyped_storage().nbytes()
        place = file.write(bytes_of(bytes_in(tensor)))
        self._read_into = functools.partial(file.read, place=place)
        weakref.finalize(self, file.give_back, place, self._num_bytes)

    def _read(self) -> Tensor:
        import torch

        found = torch.empty(self._num_bytes, dtype=torch.uint8)
        self._read_into(bytes_of(found))
        return found
