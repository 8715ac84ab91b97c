"""Numbers in fewer bits: as bfloat16, or as codes in blocks with a scale each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Fields = dict[str, "Tensor"]
"""What holds one tensor of state, by the names of its store."""
_BLOCK = 256
"""Numbers that share a scale."""
_HALF, _TOP = 127, 255
"""Codes of the largest numbers: on either side of 0, and above it."""
_BLOCK4, _HALF4, _TOP4 = 128, 7, 15
"""The same of 4 bits."""


def by_noise(values: Tensor, noise: Tensor) -> Tensor:
    """Numbers that bfloat16 has: of the two about each, the one farther from 0 where its noise is at least as far from
    1 as the number is from the other. Over all noise, the mean is the number.

    Args:
        values: in fp32.
        noise: in [0, 1), one for each.
    """
    import torch

    bits = values.view(torch.int32) + noise.mul(2**16).to(torch.int32)
    rounded = bits.bitwise_and_(-(2**16)).view(torch.float32)
    return rounded.masked_fill_(values.isnan(), torch.nan)  # of whose bits the largest, a card's, would become 0


class Store(Protocol):
    """How the numbers of one tensor are kept."""

    @property
    def block(self) -> int:
        """How many lie together, and can be read without the others."""

    @property
    def fields(self) -> Mapping[str, str]:
        """Names of what holds them, and their dtypes; the first name is no other store's."""

    @property
    def adds_up(self) -> bool:
        """Whether what is kept is of all numbers, so that it is written to empty room, and read from what was there."""

    def empty(self, like: Tensor) -> Fields:
        """Room for as many numbers as a parameter has."""

    def read(self, fields: Fields, start: int, end: int, signed: bool) -> Tensor:
        """The numbers from one place to another, in fp32; ``start`` is a multiple of every block's size."""

    def write(self, fields: Fields, start: int, values: Tensor, signed: bool, noise: Tensor) -> None:
        """Keep numbers from a place on.

        Args:
            fields: as ``empty`` made them.
            start: a multiple of every block's size.
            values: in fp32, flat.
            signed: whether some may be below 0. What cannot be is an average over many steps: a change at each that is
                less than half a step of the code would be lost for ever if it was rounded to the nearest.
            noise: in [0, 1), one for each number, by which those are rounded up or down; by 4 bits, all are.
        """


class BFloat16:
    """As bfloat16."""

    block: ClassVar[int] = 1
    fields: ClassVar[Mapping[str, str]] = {"bfloat16": "bfloat16"}
    adds_up: ClassVar[bool] = False

    def empty(self, like: Tensor) -> Fields:
        """2 bytes for each."""
        import torch

        return {"bfloat16": torch.empty(like.numel(), dtype=torch.bfloat16, device=like.device)}

    def read(self, fields: Fields, start: int, end: int, signed: bool) -> Tensor:
        """Without an error."""
        return fields["bfloat16"][start:end].float()

    def write(self, fields: Fields, start: int, values: Tensor, signed: bool, noise: Tensor) -> None:
        """To the nearest, or by the noise."""
        fields["bfloat16"][start : start + values.numel()].copy_(values if signed else by_noise(values, noise))


class Float32:
    """As they are."""

    block: ClassVar[int] = 1
    fields: ClassVar[Mapping[str, str]] = {"float32": "float32"}
    adds_up: ClassVar[bool] = False

    def empty(self, like: Tensor) -> Fields:
        """4 bytes for each."""
        import torch

        return {"float32": torch.empty(like.numel(), device=like.device)}

    def read(self, fields: Fields, start: int, end: int, signed: bool) -> Tensor:
        """Where they are."""
        return fields["float32"][start:end]

    def write(self, fields: Fields, start: int, values: Tensor, signed: bool, noise: Tensor) -> None:
        """Without an error."""
        fields["float32"][start : start + values.numel()].copy_(values)


class Codes:
    """As a byte for each, which says what share the number is of the largest of its block: of its square root, or of
    its fourth root if none is below 0. So small numbers keep more digits, and what is divided by is never 0.

    Source: Dettmers et al. 2021, arXiv:2110.02861, for blocks
    """

    block: ClassVar[int] = _BLOCK
    fields: ClassVar[Mapping[str, str]] = {"codes8": "uint8", "scales": "float32"}
    adds_up: ClassVar[bool] = False

    def empty(self, like: Tensor) -> Fields:
        """A byte for each, in whole blocks, and 4 for each block."""
        import torch

        num_blocks = -(-like.numel() // _BLOCK)
        return {
            "codes8": torch.empty(num_blocks * _BLOCK, dtype=torch.uint8, device=like.device),
            "scales": torch.empty(num_blocks, device=like.device),
        }

    def read(self, fields: Fields, start: int, end: int, signed: bool) -> Tensor:
        """What the codes stand for."""
        first, last = start // _BLOCK, -(-end // _BLOCK)
        codes = fields["codes8"][first * _BLOCK : last * _BLOCK].view(-1, _BLOCK).float()
        scales = fields["scales"][first:last, None]
        if signed:
            codes.sub_(_HALF)
            values = codes.mul_(codes.abs()).mul_(scales / _HALF**2)
        else:
            values = codes.mul_(1 / _TOP).square_().square_().mul_(scales)
        return values.view(-1)[: end - start]

    def write(self, fields: Fields, start: int, values: Tensor, signed: bool, noise: Tensor) -> None:
        """To the nearest code, or by the noise."""
        import torch

        missing = -values.numel() % _BLOCK
        if missing:
            values, noise = (torch.nn.functional.pad(one, (0, missing)) for one in (values, noise))
        blocks = values.view(-1, _BLOCK)
        scales = blocks.abs().amax(1, keepdim=True)
        unit = scales.clamp_min(torch.finfo(torch.float32).tiny)
        if signed:
            codes = blocks.abs().sqrt_().mul_(unit.rsqrt().mul_(_HALF)).copysign_(blocks).add_(_HALF + 0.5)
        else:
            roots = blocks.sqrt().sqrt_().mul_(unit.pow(-0.25).mul_(_TOP))
            codes = roots.add_(noise.view_as(blocks)).clamp_(1, _TOP)
        first = start // _BLOCK
        fields["codes8"][start : start + values.numel()].copy_(codes.view(-1))
        fields["scales"][first : first + scales.numel()].copy_(scales.view(-1))


class Codes4:
    """As 4 bits for each, by the same roots in blocks of 128; a byte has one of a block's first half and one of its
    second. Steps are so unlike that noise goes by where a number lies between two of them: the mean of what is kept is
    the number, and noise of a half rounds to the nearest. What has no sign is never 0.

    Source: Li et al. 2023, arXiv:2309.01507, for 4 bits, blocks, and squares without a 0
    """

    block: ClassVar[int] = _BLOCK4
    fields: ClassVar[Mapping[str, str]] = {"codes4": "uint8", "scales": "float32"}
    adds_up: ClassVar[bool] = False

    def empty(self, like: Tensor) -> Fields:
        """Half a byte for each, in whole blocks, and 4 for each block."""
        import torch

        num_blocks = -(-like.numel() // _BLOCK4)
        return {
            "codes4": torch.empty(num_blocks * _BLOCK4 // 2, dtype=torch.uint8, device=like.device),
            "scales": torch.empty(num_blocks, device=like.device),
        }

    def read(self, fields: Fields, start: int, end: int, signed: bool) -> Tensor:
        """What the codes stand for."""
        import torch

        first, last = start // _BLOCK4, -(-end // _BLOCK4)
        pairs = fields["codes4"][first * _BLOCK4 // 2 : last * _BLOCK4 // 2].view(-1, _BLOCK4 // 2)
        codes = torch.cat((pairs & _TOP4, pairs >> 4), 1).float()
        scales = fields["scales"][first:last, None]
        if signed:
            codes.sub_(_HALF4)
            values = codes.mul_(codes.abs()).mul_(scales / _HALF4**2)
        else:
            values = codes.square_().square_().mul_(scales / _TOP4**4)
        return values.view(-1)[: end - start]

    def write(self, fields: Fields, start: int, values: Tensor, signed: bool, noise: Tensor) -> None:
        """To one of the two codes about each, by the noise."""
        import torch

        missing = -values.numel() % _BLOCK4
        if missing:
            values, noise = (torch.nn.functional.pad(one, (0, missing)) for one in (values, noise))
        blocks, noise = values.view(-1, _BLOCK4), noise.view(-1, _BLOCK4)
        scales = blocks.abs().amax(1, keepdim=True)
        unit = scales.clamp_min(torch.finfo(torch.float32).tiny)
        shares = blocks.abs().div_(unit)
        if signed:  # n + (share - n²) / (2n + 1)
            steps = shares.mul_(_HALF4**2).sqrt().floor_()
            shares.addcmul_(steps, steps).add_(steps).div_(steps.mul_(2).add_(1))
            codes = shares.add_(noise).floor_().clamp_(max=_HALF4).copysign_(blocks).add_(_HALF4)
        else:  # n + (share - n⁴) / (2n + 1) / (2n² + 2n + 1)
            steps = shares.mul_(_TOP4**4).sqrt().sqrt_().floor_().clamp_(1, _TOP4 - 1)
            below = steps.to(torch.uint8)
            shares.sub_(steps.square_().square_()).div_(steps.copy_(below).mul_(2).add_(1))
            codes = shares.div_(steps.square_().add_(1).div_(2)).add_(below).add_(noise).floor_().clamp_(1, _TOP4)
        first, last = start // _BLOCK4, start // _BLOCK4 + scales.numel()
        halves = codes.to(torch.uint8).view(-1, 2, _BLOCK4 // 2)
        fields["codes4"][first * _BLOCK4 // 2 : last * _BLOCK4 // 2].copy_((halves[:, 0] | halves[:, 1] << 4).view(-1))
        fields["scales"][first:last].copy_(scales.view(-1))


class Factors:
    """As the means of rows and columns of the matrix that the numbers lie in: each is taken to be the product of its
    row's and its column's, over the mean of all. What averages them over steps has these means of the true average,
    whatever is between; a matrix of rank 1 is kept as it is.

    Source: Shazeer and Stern 2018, arXiv:1804.04235
    """

    block: ClassVar[int] = 1
    fields: ClassVar[Mapping[str, str]] = {"rows": "float32", "columns": "float32"}
    adds_up: ClassVar[bool] = True

    def empty(self, like: Tensor) -> Fields:
        """4 bytes for each row and column."""
        import torch

        num_rows = _num_rows(like)
        return {
            "rows": torch.zeros(num_rows, device=like.device),
            "columns": torch.zeros(like.numel() // num_rows, device=like.device),
        }

    def read(self, fields: Fields, start: int, end: int, signed: bool) -> Tensor:
        """Products."""
        import torch

        rows, columns = fields["rows"], fields["columns"]
        length = columns.numel()
        first, last = start // length, -(-end // length)
        shares = columns / columns.mean().clamp_min(torch.finfo(torch.float32).tiny)
        return (rows[first:last, None] * shares).view(-1)[start - first * length : end - first * length]

    def write(self, fields: Fields, start: int, values: Tensor, signed: bool, noise: Tensor) -> None:
        """Add them to the means, which begin at 0."""
        import torch

        rows, columns = fields["rows"], fields["columns"]
        length = columns.numel()
        first, before = start // length, start % length
        behind = -(before + values.numel()) % length
        whole = torch.nn.functional.pad(values, (before, behind)).view(-1, length)
        rows[first : first + len(whole)].add_(whole.sum(1), alpha=1 / length)
        columns.add_(whole.sum(0), alpha=1 / rows.numel())


def _num_rows(like: Tensor) -> int:
    """Of the matrix that a parameter's elements are in their order in memory: cut between two of its dimensions, where
    rows and columns are fewest together. What has one dimension is one column."""
    sides = [side for _, side in sorted(zip(like.stride(), like.shape, strict=True), reverse=True)]
    cuts = [math.prod(sides[:number]) for number in range(1, len(sides) + 1)]
    return min(reversed(cuts), key=lambda rows: rows + like.numel() // rows)
