"""Ranks that may run out of memory apart, and halve their micro-batches together: they agree once they have all made
their backward passes, and exchange gradients only then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import PlanError, TaskError
from ..techniques import Settings
from ..techniques.support.replica import within

_BUCKET_BYTES = 25 * 2**20
"""Of gradients that are exchanged in one call, as in torch's DistributedDataParallel."""


class _Kind(NamedTuple):
    """Of tensors that can lie in one flat one."""

    dtype: torch.dtype
    device: torch.device


class RanOutElsewhere(Exception):
    """Memory has run out in another rank, in this optimizer step."""


def check_can_halve(settings: Settings, model: nn.Module, num_ranks: int) -> None:
    """
    Args:
        settings: applied.
        model: with them.
        num_ranks: processes that train together.

    Raises:
        PlanError: an optimizer step cannot be made again, in this process or in all of them.
    """
    if settings.batch is not None and settings.batch.packed:
        raise PlanError(
            "halve_when_out_of_memory: a packed row (batch.packed) is not halved by samples. Leave one of the two out."
        )
    if (freed := next((one.name for one in settings.techniques() if one.frees_gradients), None)) is not None:
        raise PlanError(
            f"halve_when_out_of_memory: {freed} steps parameters within the backward pass, which cannot be made again "
            "once memory has run out in it. Leave one of the two out."
        )
    if settings.parallel.comm_hook != "allreduce":
        raise PlanError(
            "halve_when_out_of_memory: gradients are exchanged once the ranks' backward passes are made, as they are "
            "and not by parallel's comm_hook. Leave one of the two out."
        )
    kind = settings.parallel.kind
    waits: str | None = kind if kind in ("fsdp", "tensor") else None
    if waits is None and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        waits = "SyncBatchNorm"
    if num_ranks > 1 and waits is not None:
        raise PlanError(
            f"halve_when_out_of_memory: {waits} exchanges data between ranks within forward and backward passes, where "
            "a rank that runs out of memory leaves the others waiting for it. Use kind: ddp, and a norm that is each "
            "rank's own; or leave it out."
        )


class Together:
    """What takes the place of DistributedDataParallel, whose backward pass exchanges gradients while it goes on: a
    rank that ran out of memory in it could not be waited for.

    Every rank comes to :meth:`any_ran_out` once for each try of an optimizer step: at its end, or when memory runs out.
    """

    def __init__(self, replica: nn.Module) -> None:
        """
        Args:
            replica: the model as it was shared out, which gave each rank the parameters of rank 0.
        """
        self.model = within(replica)
        """The user's own."""
        self._group = dist.new_group(backend="gloo")  # the flag is the host's: no device is waited for
        self._room: dict[_Kind, Tensor] = {}

    def make_room(self) -> None:
        """Take the memory that :meth:`exchange` needs, before all agree: within it, the others would wait for a rank
        that has none left."""
        self._room = {}
        wanted: dict[_Kind, int] = {}
        for tensors in (self._gradients(), self._buffers()):
            for kind, bucket in _buckets(tensors):
                wanted[kind] = max(wanted.get(kind, 0), sum(one.numel() for one in bucket))
        self._room = {kind: torch.empty(count, dtype=kind.dtype, device=kind.device) for kind, count in wanted.items()}

    def any_ran_out(self, here: bool) -> bool:
        """Whether memory ran out in this rank or another."""
        flag = torch.tensor([here], dtype=torch.uint8)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        if flag:
            self._room = {}
        return bool(flag)

    def gathered(self, value: Any) -> list[Any]:
        """What each rank gives, in their order."""
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, value, group=self._group)
        return found

    def exchange(self) -> None:
        """Average the gradients over all ranks; buffers (BatchNorm's) become rank 0's. After :meth:`make_room`.

        Raises:
            TaskError: a parameter has no gradient here, and may have one in another rank.
        """
        trained = ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)
        if missing := [name for name, parameter in trained if parameter.grad is None]:
            raise TaskError(
                f"{missing[0]}: the loss does not depend on this parameter, and processes average the gradients of "
                "all. Freeze it (requires_grad_(False)), or use it in forward."
            )
        room, self._room = self._room, {}
        _in_buckets(self._gradients(), room, _average)
        _in_buckets(self._buffers(), room, lambda values: dist.broadcast(values, 0))

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.requires_grad and p.grad is not None]

    def _buffers(self) -> list[Tensor]:
        return [*self.model.buffers()]


def _average(values: Tensor) -> None:
    dist.all_reduce(values)
    values.div_(dist.get_world_size())


def _in_buckets(tensors: Sequence[Tensor], room: dict[_Kind, Tensor], act: Callable[[Tensor], object]) -> None:
    """``act`` on all of them, some at a time in one flat tensor, which is copied back. Nothing is allocated."""
    for kind, bucket in _buckets(tensors):
        sizes = [tensor.numel() for tensor in bucket]
        flat = room[kind][: sum(sizes)]
        parts = [part.view(one.shape) for one, part in zip(bucket, torch.split(flat, sizes), strict=True)]
        for tensor, part in zip(bucket, parts, strict=True):
            part.copy_(tensor.detach())
        act(flat)
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.detach().copy_(part)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[tuple[_Kind, list[Tensor]]]:
    for kind in dict.fromkeys(_Kind(one.dtype, one.device) for one in tensors):
        bucket: list[Tensor] = []
        num_bytes = 0
        for tensor in tensors:
            if (tensor.dtype, tensor.device) != kind:
                continue
            bucket.append(tensor)
            num_bytes += tensor.numel() * tensor.element_size()
            if num_bytes >= _BUCKET_BYTES:
                yield kind, bucket
                bucket, num_bytes = [], 0
        if bucket:
            yield kind, bucket
