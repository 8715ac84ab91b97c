"""Parallel: several processes that train one model together, each its share of the samples, or of the layers."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from ..errors import PlanError
from .support.base import Effect, Exactness, Program, Run, Stage, Technique
from .support.facts import Facts, num_processors

if TYPE_CHECKING:
    import torch
    from torch import nn

    from . import Settings

_THREADS = "OMP_NUM_THREADS"
_NUMBER_BYTES = 4


class Parallel(Technique):
    """Data parallelism (torch's ``DistributedDataParallel`` or ``fully_shard``), or tensor parallelism.

    The processes take the micro-batches of an optimizer step in turn, so that ``batch`` says the same with and without:
    ``accumulate`` counts the forward passes of all of them. With ``tensor`` each of them makes every pass.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html;
    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html;
    https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html; Shoeybi et al. 2019, arXiv:1909.08053
    """

    name: ClassVar[str] = "parallel"
    not_in_inference: ClassVar[str] = "it shares out a training"
    stage: ClassVar[Stage] = Stage.SHARD
    affects: ClassVar[frozenset[Effect]] = frozenset({"tensors", "update", "process"})
    not_in_scripts: ClassVar[str] = "how many processes train is the command's own to say (torchrun, accelerate launch)"
    purposes: ClassVar[Mapping[str, str]] = {
        "ddp": "Each process has the whole model; gradients are averaged while backward goes on.",
        "fsdp": "Each process keeps a shard of parameters, gradients and optimizer state, and gathers blocks for use.",
        "tensor": "Each process has a part of the wide layers, and computes its part of them for all samples.",
    }

    kind: Literal["none", "ddp", "fsdp", "tensor"] = "none"
    """``none`` is one process; ``ddp`` keeps the whole model in each; ``fsdp`` shards each block, and the rest;
    ``tensor`` splits linear layers by columns, then by rows."""
    processes: PositiveInt = Field(default=1, strict=True, le=4096)
    """Processes that train together (torch's world size); on CUDA, each has a device to itself."""
    effective: PositiveInt | None = Field(default=None, strict=True)
    """Samples in one optimizer step of all processes, where unlike devices have unequal shares of them: ``batch`` is
    then this process's own. Absent, ``batch`` is that of all."""
    comm_hook: Literal["allreduce", "fp16_compress", "bf16_compress"] = "allreduce"
    """How ``ddp`` exchanges gradients: as they are, or in half the bytes (torch's hooks of these names). torch takes
    that of bf16 over NCCL alone."""
    reshard: bool = True
    """Whether ``fsdp`` frees a block's gathered parameters after its forward pass, and gathers them again for backward
    (torch's ``reshard_after_forward``); without, they stay until backward."""
    cpu_offload: bool = False
    """Whether ``fsdp`` keeps its shards of parameters, gradients and optimizer state in the host's memory, where the
    optimizer steps (torch's ``CPUOffloadPolicy``); a block's parameters are on the card while they are gathered."""

    @model_validator(mode="after")
    def _check_processes(self) -> Parallel:
        if (self.kind == "none") != (self.processes == 1):
            raise ValueError(
                f"processes: kind {self.kind} takes {'1' if self.kind == 'none' else '2 or more'}, but got "
                f"{self.processes}. Use kind: ddp, fsdp or tensor with processes: 2 or more, or no row."
            )
        if self.effective is not None and self.effective < max(2, self.processes):
            raise ValueError(
                f"effective: each of {_counted(self.processes)} takes a sample of an optimizer step or more, but got "
                f"{self.effective}. Leave it out where batch is that of all."
            )
        if self.effective is not None and self.kind == "none":
            raise ValueError("effective: one process has the whole batch. Leave it out, or use kind: ddp.")
        if self.effective is not None and self.kind == "tensor":
            raise ValueError("effective: kind tensor gives each process all samples. Leave it out, or use kind: ddp.")
        if self.kind != "ddp" and self.comm_hook != "allreduce":
            raise ValueError(f"comm_hook: kind {self.kind} has none. Leave it out, or use kind: ddp.")
        if self.kind != "fsdp" and not self.reshard:
            raise ValueError(f"reshard: kind {self.kind} gathers no parameters. Leave it out, or use kind: fsdp.")
        if self.kind != "fsdp" and self.cpu_offload:
            raise ValueError(f"cpu_offload: kind {self.kind} has no shards. Leave it out, or use kind: fsdp.")
        return self

    @property
    def num_shares(self) -> int:
        """Processes that a batch is divided between."""
        return 1 if self.kind == "tensor" else self.processes

    def describe(self, facts: Facts | None = None) -> str:
        """``ddp over 2 processes``."""
        if self.kind == "none":
            return "one process"
        share = f", a share of {self.effective} samples" if self.effective else ""
        hook = "" if self.comm_hook == "allreduce" else f", gradients exchanged in {self.comm_hook[:4]}"
        kept = "" if self.reshard else ", gathered parameters kept until backward"
        host = ", shards on the host" if self.cpu_offload else ""
        return f"{self.kind} over {_counted(self.processes)}{share}{hook}{kept}{host}"

    @classmethod
    def choices(cls, facts: Facts) -> tuple[Parallel, ...]:
        """One process: how many there are is the user's to say, in a space or a plan."""
        return (cls(),)

    @classmethod
    def reference(cls, facts: Facts) -> Parallel:
        """The job's own."""
        return cls(kind=facts.shared_by, processes=facts.ranks)

    def exactness(self, facts: Facts) -> Exactness:
        """Half the bits of what is exchanged."""
        return "exact" if self.comm_hook == "allreduce" else "rounding"

    def prior_gain(self) -> tuple[float, float]:
        """Nothing was measured: processes that share a CPU may gain or lose by it."""
        return (0.0, 0.0) if self.kind == "none" else (0.0, 0.3)

    def unavailable(self, facts: Facts) -> str | None:
        """Each process takes a device, or a processor, of the machine that a trial runs on."""
        if self.processes > facts.num_devices:
            what = "devices" if facts.device.type == "cuda" else "processors"
            return f"{self.processes} processes take as many {what}, and a trial has {facts.num_devices} here"
        if self.comm_hook == "bf16_compress" and facts.device.type != "cuda":
            return "torch exchanges gradients in bf16 on CUDA only: use fp16_compress"
        if self.cpu_offload and facts.device.type == "cpu":
            return "cpu_offload: shards are on the host already, as all of a CPU's job is"
        if self.effective is not None:
            return "a trial has like devices: `autotune search --devices` shares a training out over unlike ones"
        if self.num_shares > 1 and facts.dataset_kind == "iterable" and facts.ranks == 1:
            return "an iterable dataset, or a loader of the task's own, cannot be shared out between processes"
        return None

    def options_of(self, program: Program) -> Mapping[str, Any]:
        """Every parameter is used, as in a trial."""
        return {"ddp_find_unused_parameters": False} if self.kind != "none" and program == "Trainer" else {}

    def beyond_script(self) -> str | None:
        """Like shares are the script's own to join."""
        if (reason := self.beyond_wrappers()) is not None:
            return reason
        if self.effective is None:
            return None
        return (
            "parallel: gradients of unequal shares are weighted by them, which the script's DistributedDataParallel "
            "does not do. Use autotune.apply in the script, or a plan of equal shares."
        )

    def beyond_wrappers(self) -> str | None:
        """What a model lacks that a script or a framework has wrapped, and what to do; None where it lacks nothing."""
        if self.kind == "tensor":
            return "parallel: kind tensor is for autotune.apply, which splits the model itself. Use ddp here."
        own = {"comm_hook": self.comm_hook != "allreduce", "reshard": not self.reshard, "cpu_offload": self.cpu_offload}
        if (name := next((one for one, is_set in own.items() if is_set), None)) is None:
            return None
        return f"parallel: {name} is for autotune.apply, which wraps the model itself. Leave it out here."

    def conflicts(self, settings: Settings) -> str | None:
        """What would not be applied, or would be wrong, in several processes."""
        if self.kind == "none":
            return None
        if self.effective is not None and settings.batch is None:
            return "a share of the samples is stated by batch: give it"
        if self.effective is None and settings.batch is not None and settings.batch.accumulate % self.num_shares:
            return "accumulate counts the micro-batches of all processes: use a multiple of processes"
        if any(one.frees_gradients for one in settings.techniques()):
            return "gradients are whole only once those of all processes are averaged: use after_backward"
        if self.kind == "tensor":
            return _no_parts(settings)
        return None if self.kind == "ddp" else _no_shards(settings)

    def as_predicted(self, facts: Facts) -> Parallel:
        """As one process, whose memory is charged so many times."""
        return Parallel()

    def bytes_on_card(self, beside_bytes: int, facts: Facts) -> int | None:
        """Bytes of tensors at their peak, at most, on a card whose shards are on the host; None where those are on the
        device, all blocks stay gathered until backward, or nothing is known of the model.

        It is there whole before it is shared out. In a step what is outside of blocks stays gathered, beside the buffer
        that it was gathered in, and so do a block and the next; in backward their gradients come on top, the input of
        the exchange, and its result.

        Args:
            beside_bytes: of a step's other tensors.
            facts: of the task.
        """
        if not (self.cpu_offload and self.reshard) or facts.device.type == "cpu":
            return None
        if not facts.block_bytes + facts.outside_bytes:
            return None
        outside, block = facts.outside_bytes, facts.block_bytes
        in_block = 2 * outside + (4 + 4 / self.processes) * block
        at_end = (3 + 2 / self.processes) * outside + 2 * block
        in_step = round(max(in_block, at_end)) + beside_bytes
        return max(in_step, _NUMBER_BYTES * facts.num_parameters) + facts.buffer_bytes

    def host_cached_bytes(self, facts: Facts) -> int:
        """The shards of all processes."""
        if not self.cpu_offload or facts.device.type == "cpu":
            return 0
        return _NUMBER_BYTES * (facts.num_parameters + facts.num_trainable * (1 + facts.optimizer_states))

    def times_charged(self, facts: Facts) -> int | None:
        """On a CPU, of each process; on CUDA, a device's own. What a shard on the device, or a part, takes is not
        predicted."""
        if self.kind in ("fsdp", "tensor") and self.bytes_on_card(0, facts) is None:
            return None
        return self.processes if facts.device.type == "cpu" else 1

    def environment(self) -> dict[str, str]:
        """The machine's processors, shared out: torchrun gives each process one thread where nothing is set. Processes
        of unequal shares are on unlike devices, each with its own."""
        return {} if self.kind == "none" or self.effective else {_THREADS: str(self._threads())}

    def not_in_force(self) -> str | None:
        """Other numbers of threads than the plan gives."""
        found = os.environ.get(_THREADS)
        if not self.environment() or found == str(self._threads()):
            return None
        return f"{_THREADS} is {found or 'not set'}, and each of the plan's processes computes with {self._threads()}"

    def undo(self, model: nn.Module) -> nn.Module:
        """The model within; what is sharded cannot be had whole again.

        Raises:
            PlanError: it is sharded, or split.
        """
        from .support.replica import within

        fsdp = sys.modules.get("torch.distributed.fsdp")
        if fsdp is not None and isinstance(model, fsdp.FSDPModule):
            raise PlanError("the model is sharded already (fully_shard), which is not undone. Build it anew.")
        if "torch.distributed.tensor.parallel" in sys.modules:
            from .support.split import is_split

            if is_split(model):
                raise PlanError("the model is split already (parallelize_module), which is not undone. Build it anew.")
        return within(model)

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """Wrapped for ``ddp``; changed in place for ``fsdp`` (each block, then what is left of the model) and for
        ``tensor``.

        Raises:
            PlanError: there is nothing to share or to split, or this is no such group of processes.
        """
        if self.kind == "none":
            return model
        import torch.distributed as dist

        reason = self.other_size(dist.get_world_size() if dist.is_initialized() else 1)
        if reason is not None:
            raise PlanError(reason)
        if not any(p.requires_grad for p in model.parameters()):
            raise PlanError(
                f"settings.parallel.kind: {self.kind} shares gradients of parameters, and the model trains none. Leave "
                "the row out."
            )
        if self.kind == "ddp":
            from .support.replica import Replica

            return Replica(model, self.comm_hook)
        if self.kind == "tensor":
            from .support.split import split

            split(model, self.processes)
            return model
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        device = next(p.device.type for p in model.parameters())
        policy = CPUOffloadPolicy(pin_memory=device != "cpu") if self.cpu_offload else OffloadPolicy()
        if self.cpu_offload and "cpu:" not in dist.get_backend_config():
            raise PlanError(
                "settings.parallel.cpu_offload: the norm of gradients, and the state, of shards on the host are "
                f"exchanged there, but this group of processes has {dist.get_backend_config()} (torch: No backend type "
                'associated with device type cpu). Join it by init_process_group("cpu:gloo,cuda:nccl").'
            )
        mesh, reshard = init_device_mesh(device, (self.processes,)), None if self.reshard else False
        for module in (*dict.fromkeys(blocks), model):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard, offload_policy=policy)
        return model

    def on_optimizer(
        self, optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None
    ) -> torch.optim.Optimizer:
        """One parameter at a time for ``tensor``: torch's grouped kernels do not take parts and wholes together."""
        if self.kind == "tensor":
            flags: dict[str, Any] = {name: False for name in ("foreach", "fused") if name in optimizer.defaults}
            for group in (optimizer.defaults, *optimizer.param_groups):
                group.update(flags)
        return optimizer

    def other_size(self, found: int) -> str | None:
        """Why a job of so many processes cannot have this; None where it can."""
        if found == self.processes:
            return None
        start = "python" if self.processes == 1 else f"torchrun --nproc-per-node {self.processes}"
        row = "no row" if found == 1 else f"`parallel: {{kind: ddp, processes: {found}}}`"
        return (
            f"settings.parallel: the plan is for {_counted(self.processes)}, but this is "
            f"{'the only one' if found == 1 else f'one of {found} ranks'} (torchrun, torch.distributed). Start the job "
            f"by `{start} train.py`, or give the plan {row}; its batch stays, and the speed and the memory that were "
            "measured do not hold."
        )

    def _threads(self) -> int:
        return max(1, num_processors() // self.processes)


def _counted(processes: int) -> str:
    return "one process" if processes == 1 else f"{processes} processes"


def _no_shards(settings: Settings) -> str | None:
    """What a sharded model was not tried with, or cannot have."""
    if settings.compile.kind != "none":
        return "fsdp gathers parameters in hooks, which a compiled program was not tried with: use ddp"
    if settings.memory_format.kind != "contiguous":
        return "fsdp takes parameters that are contiguous: leave memory_format out, or use ddp"
    if any(one.scales_loss for one in settings.techniques()):
        return "fsdp was not tried with a loss scaler: use bf16"
    return None


def _no_parts(settings: Settings) -> str | None:
    """What a model whose layers are split was not tried with, or cannot have."""
    if settings.optimizer.kind in ("foreach", "fused"):
        return "tensor leaves some parameters whole, which grouped kernels do not take with parts: use for_loop"
    if any(one.scales_loss for one in settings.techniques()):
        return "tensor was not tried with a loss scaler: use bf16"
    untried = (
        Stage.PRUNING, Stage.LOW_RANK, Stage.FROZEN, Stage.ATTENTION, Stage.LAYERS, Stage.TILES, Stage.DEVICE,
        Stage.COMPILE,
    )  # fmt: skip
    other = next((one for one in settings.chosen() if one.stage in untried), None)
    return f"tensor was not tried with {other.name}: use one of the two" if other is not None else None
