"""``Form``: how the numbers of a weight lie in one piece of memory, as codes in blocks with their scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .stores import Codes, Codes4, Fields, Store

STORES: Mapping[str, Store] = {"8bit": Codes(), "4bit": Codes4()}
"""By the kind of ``frozen_weights``."""
_LEAST_PIECE, _NUM_PIECES = 2**16, 16
"""Numbers that are made at once beside the result, at least, and about how many pieces a large weight comes to. Powers
of 2, so that whole blocks are in each."""
_NEAREST = 0.5
"""The noise that rounds to the nearest."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Of weights that are kept so."""


@dataclass(frozen=True)
class Form:
    """What the codes of a weight are of."""

    kind: str
    """Of store."""
    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of codes and scales."""
        return self._layout[-1][2]

    @cached_property
    def _layout(self) -> tuple[tuple[str, int, int, torch.dtype], ...]:
        """Of the parts in one piece of memory: names, where they start and end, and their dtypes."""
        parts = STORES[self.kind].empty(torch.empty(self.shape, device="meta"))
        found, start = [], 0
        for name, part in parts.items():
            found.append((name, start, start + part.nbytes, part.dtype))
            start += part.nbytes
        return tuple(found)

    def fields(self, codes: Tensor) -> Fields:
        """What the store calls the parts of one piece of memory.

        Args:
            codes: (bytes,) of uint8.
        """
        return {name: codes[start:end].view(dtype) for name, start, end, dtype in self._layout}

    def encode(self, values: Tensor, codes: Tensor) -> None:
        """Write numbers as codes.

        Args:
            values: of any shape with as many numbers.
            codes: (bytes,) of uint8, to write to.
        """
        fields, flat, store = self.fields(codes), values.detach().reshape(-1), STORES[self.kind]
        for start, end in self._pieces():
            numbers = flat[start:end].float()
            store.write(fields, start, numbers, True, torch.full_like(numbers, _NEAREST))

    def decode(self, codes: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """All numbers, a piece at a time, in the weight's dtype or another."""
        made = torch.empty(self.shape, dtype=dtype or self.dtype, device=codes.device)
        fields, flat, store = self.fields(codes), made.view(-1), STORES[self.kind]
        for start, end in self._pieces():
            flat[start:end] = store.read(fields, start, end, True)
        return made

    def rows(self, codes: Tensor, numbers: Tensor) -> Tensor:
        """Some rows, without the others: of the blocks in which they lie.

        Args:
            codes: (bytes,) of uint8.
            numbers: (…) of rows.

        Returns:
            (…, features), in the weight's dtype.

        Raises:
            RuntimeError: there is no such row. A card asserts it.
        """
        is_there = ((numbers >= 0) & (numbers < self.shape[0])).all()
        torch._assert_async(is_there, f"index out of range: rows 0 to {self.shape[0] - 1} were expected")
        fields, features = self.fields(codes), self.shape[1]
        num_blocks, block = fields["scales"].numel(), STORES[self.kind].block
        starts = numbers.reshape(-1).long() * features
        per_row = 1 if block % features == 0 else -(-features // block) + (features % block != 0)
        places = (starts // block)[:, None] + torch.arange(per_row, device=codes.device)
        places = places.clamp_(max=num_blocks - 1).view(-1)
        taken = {name: one.view(num_blocks, -1)[places].view(-1) for name, one in fields.items()}
        found = STORES[self.kind].read(taken, 0, places.numel() * block, True).view(-1, per_row * block)
        if features % block:
            found = found.gather(1, (starts % block)[:, None] + torch.arange(features, device=codes.device))
        return found.to(self.dtype).view(*numbers.shape, features)

    def _pieces(self) -> Iterator[tuple[int, int]]:
        length = self.shape.numel()
        step = max(_LEAST_PIECE, 2 ** (length // _NUM_PIECES).bit_length())
        return ((start, min(start + step, length)) for start in range(0, length, step))
