"""Checks a script's own data parallelism (its wrapper around the model) against the plan."""

from __future__ import annotations

import sys
from typing import Any, Literal

from ..techniques import Settings, Stage

_BEFORE = (Stage.MODEL, Stage.LOW_RANK, Stage.LAYERS, Stage.CHECKPOINTING, Stage.DEVICE, Stage.COMPILE)
"""Techniques that change modules or their tensors, which is too late after ``fully_shard``."""
_CALLS = {"ddp": "DistributedDataParallel(model)", "fsdp": "fully_shard(model)"}


def unwrapped(model: Any) -> Any:
    """The module itself, of a wrapper of torch.compile's, of data parallelism or of Fabric's."""
    return wrappers(model)[-1]


def wrappers(model: Any) -> list[Any]:
    """The model as the script calls it, and each module that it wraps, down to the innermost."""
    found = [model]
    while (inner := _wrapped(found[-1])) is not found[-1]:
        found.append(inner)
    return found


def _wrapped(outer: Any) -> Any:
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    if isinstance(outer, DataParallel | DistributedDataParallel):
        return outer.module
    if type(outer).__name__ == "_FabricModule":  # lightning's, or lightning_fabric's
        return outer._forward_module
    return getattr(outer, "_orig_mod", outer)


def mismatch(settings: Settings, model: Any) -> str | None:
    """Why a plan's parallelism does not match the script's; None if it does."""
    kind, found = settings.parallel.kind, shared_by(model)
    if kind not in ("none", found):  # one process may have either
        return (
            f"parallel: the plan has {kind}, but the script trains with {found}. Joining processes is the script's "
            f"own: {_CALLS[kind]} there, or search again for what it does."
        )
    late = [one.name for one in settings.chosen() if one.stage in _BEFORE]
    if found == "fsdp" and late:
        return (
            f"{late[0]} comes before fully_shard, which the script has called already. Call "
            "autotune.apply_to_model(plan, model) in the script, before fully_shard."
        )
    return None


def shared_by(model: Any) -> Literal["none", "ddp", "fsdp"]:
    """What the script's processes share its model by."""
    from torch.nn.parallel import DistributedDataParallel

    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in unwrapped(model).modules()):
        return "fsdp"
    return "ddp" if any(isinstance(one, DistributedDataParallel) for one in wrappers(model)) else "none"
