"""``Replica``: a model under DistributedDataParallel that is the user's own to everyone else."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ...errors import PlanError, TaskError


class Replica(DistributedDataParallel):
    """Has the attributes and the ``state_dict`` of the module within. Its buckets are the gradients, not copies of
    them."""

    def __init__(self, module: nn.Module, comm_hook: str = "allreduce") -> None:
        """
        Args:
            module: on its device; every rank's gets the parameters of rank 0's.
            comm_hook: how gradients are exchanged: ``allreduce``, or one of torch's hooks that compress them.

        Raises:
            PlanError: torch does not take that hook here.
        """
        self._was_called = False
        super().__init__(module, gradient_as_bucket_view=True)
        if comm_hook != "allreduce":
            try:
                self.register_comm_hook(None, getattr(default_hooks, f"{comm_hook}_hook"))
            except TypeError as error:  # of what this device or build of torch does not exchange
                raise PlanError(
                    f"settings.parallel.comm_hook: torch refuses {comm_hook} here: {error}. Use fp16_compress."
                ) from error

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's."""
        self._was_called = True
        return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Of the module within: without ``module.`` before its keys."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Into the module within."""
        return self.module.load_state_dict(*args, **kwargs)

    def begin(self, averages: bool) -> None:
        """A forward pass comes, whose backward averages the gradients over the ranks, or adds to this one's alone.

        What torch's ``no_sync`` does as a context around forward and backward, which a loop's own pieces have no
        place for: it holds until the next call.
        """
        self._was_called = False
        self.require_backward_grad_sync = averages

    def check(self, averages: bool) -> None:
        """Its backward has ended, and was to average the gradients, or not to.

        Raises:
            TaskError: it did otherwise.
        """
        if averages and not self.require_backward_grad_sync:
            raise TaskError(
                "the last micro-batch of an optimizer step was not known to be it in its forward, so that gradients "
                "were not averaged over the processes. Train on the micro-batches of training.loader in their order, "
                "each forward within training.forward_context()."
            )
        if averages and not self._was_called:
            raise TaskError(
                "compute_loss trained without calling the model itself, so that gradients were not averaged over the "
                "processes. Call model(...), and do the rest in its forward."
            )


def within(model: nn.Module) -> nn.Module:
    """The user's own model, of a replica; any other as it is."""
    return model.module if isinstance(model, Replica) else model
