"""The processes that train one model together: which of them this is, and what they agree on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from .techniques.batch import Batch

RANK_VARIABLES = frozenset(
    {"WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE", "GROUP_RANK", "ROLE_WORLD_SIZE"}
    | {"ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"}
)
"""What torchrun tells a process of its place among others; its own of ``TORCHELASTIC_`` aside."""


class Ranks(NamedTuple):
    """A process's place among those that train one model together."""

    rank: int = 0
    """From 0."""
    size: int = 1
    """Number of processes."""
    shares: tuple[Batch, ...] = ()
    """Of an optimizer step, each rank's own; empty where they take the micro-batches of one batch in turn."""

    @property
    def num_samples(self) -> int:
        """In an optimizer step of unequal shares; else 0."""
        return sum(share.num_samples for share in self.shares)


ALONE = Ranks()
"""One process trains by itself."""


_alone = ContextVar("_alone", default=False)
"""Whether this process is taken for one by itself."""


@contextmanager
def by_itself() -> Iterator[None]:
    """Within the block this process has no others beside it: what it traces of a step is its own part."""
    before = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(before)


def world_size() -> int:
    """Number of ranks: of torch.distributed's default group, or as torchrun has set it."""
    return this_rank().size


def this_rank() -> Ranks:
    """This process's place: in torch.distributed's default group, or as torchrun has set it."""
    if _alone.get():
        return ALONE
    if has_group():
        distributed = sys.modules["torch.distributed"]
        return Ranks(distributed.get_rank(), distributed.get_world_size())
    size, rank = (os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK"))
    return Ranks(int(rank) if rank.isdecimal() else 0, int(size)) if size.isdecimal() and int(size) > 1 else ALONE


def own_gpu() -> int | None:
    """Number of the CUDA device that one of several processes takes, of those that it sees: that of its ``LOCAL_RANK``,
    or its only one, where a launcher (SLURM, MPI) shows each process its own. None of a process by itself."""
    ranks = this_rank()
    if ranks.size == 1:
        return None
    import torch

    return int(os.environ.get("LOCAL_RANK", ranks.rank)) % torch.cuda.device_count()


def join_ranks(device: torch.device) -> Ranks:
    """This process's place, with the default group there if there are others; what torchrun has set makes one.

    Args:
        device: that the training runs on; of CUDA devices this process takes its own.
    """
    ranks = this_rank()
    if device.type == "cuda":
        from .device_memory.context import open_context

        open_context(None if has_group() else own_gpu())
    if ranks.size > 1 and not has_group():
        import torch.distributed

        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return ranks


def summed(value: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    """The sum of a number of each rank, as fp32 on ``device``; every rank has to come here."""
    import torch
    import torch.distributed

    total = torch.as_tensor(value, dtype=torch.float64, device=device).clone()
    torch.distributed.all_reduce(total)
    return total.float()


def of_first(value: Any) -> Any:
    """What rank 0 gives, in every rank: so all decide alike. Alone, a process's own value."""
    if world_size() == 1:
        return value
    import torch.distributed

    box = [value]
    torch.distributed.broadcast_object_list(box)
    return box[0]


def gathered(value: Any) -> list[Any]:
    """What each rank gives, in their order, in every rank; every rank has to come here."""
    import torch.distributed

    found: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(found, value)
    return found


def has_group() -> bool:
    """Whether torch.distributed has its default group."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()
