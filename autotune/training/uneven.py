"""What ranks train on, which they check with each other first: unequal shares of one optimizer step on unlike devices,
or all the same samples."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import PlanError, TaskError
from ..ranks import ALONE, Ranks, gathered
from ..techniques.batch import Batch
from ..techniques.parallel import Parallel


def with_shares(ranks: Ranks, parallel: Parallel, batch: Batch, model: nn.Module) -> Ranks:
    """The ranks with each one's share, where their plans have unequal ones; ``ALONE`` where each has all samples. Every
    rank has to come here.

    Args:
        ranks: of this process.
        parallel: of this rank's plan.
        batch: this rank's own, where ``parallel.effective`` is stated.
        model: before any technique.

    Raises:
        PlanError: the ranks' plans are not of one training, or their shares not what they are said to be; or the model
            has collectives in its forward, and the ranks unequal numbers of micro-batches.
    """
    if ranks.size == 1:
        return ranks
    rows, batches = zip(*gathered((parallel, batch)), strict=True)
    if len(set(rows)) > 1:
        raise PlanError(
            f"settings.parallel: the ranks' plans are to have one row, but have {_listed(rows)}. Give all ranks the "
            "plans of one bundle, or one plan."
        )
    if parallel.effective is None:
        if len(set(batches)) > 1:
            raise PlanError(
                f"settings.batch: the ranks share one batch in equal parts, but have {_listed(batches)}. State "
                "settings.parallel.effective for unequal shares (`autotune search --devices`), or give all one plan."
            )
        return ALONE if parallel.num_shares == 1 else ranks
    total = sum(one.num_samples for one in batches)
    if total != parallel.effective:
        raise PlanError(
            f"settings.parallel.effective: the ranks' batches are to add up to {parallel.effective} samples, but "
            f"{_listed(batches)} are {total}. Start as many processes on each device as the bundle says."
        )
    if len({one.accumulate for one in batches}) > 1 and (why := _collective(parallel, model)) is not None:
        raise PlanError(
            f"settings.batch.accumulate: {why} exchanges data between ranks in each forward pass, so that all need as "
            f"many of them, but got {_listed(batches)}. Give all the same accumulate, with another micro for each."
        )
    if len(set(batches)) > 1 and any(_has_own_statistics(module) for module in model.modules()):
        warnings.warn(
            f"BatchNorm sees micro-batches of unequal sizes ({_listed(batches)}): the training is not that of equal "
            "shares, to rounding. SyncBatchNorm, with the same accumulate for all, or another norm would be.",
            stacklevel=3,
        )
    return ranks._replace(shares=batches)


def check_alike(loss: Tensor) -> None:
    """Check that ranks that are to see the same samples have one loss; every rank has to come here.

    Args:
        loss: this rank's, of a micro-batch.

    Raises:
        TaskError: they differ by more than rounding.
    """
    found = [float(one) for one in gathered(loss.item())]
    if all(math.isclose(one, found[0], rel_tol=1e-5) or math.isnan(one) for one in found):
        return
    raise TaskError(
        "settings.parallel.kind: with tensor all processes train on the same samples, but their losses of the first "
        f"micro-batch are {', '.join(f'{one:.6g}' for one in found)}. Let the dataset, its sampler and its workers "
        "give the same in each: nothing by rank, nothing random but by the seed of apply; or use ddp or fsdp."
    )


def _collective(parallel: Parallel, model: nn.Module) -> str | None:
    """Modules that make ranks wait for each other in the forward pass."""
    if parallel.kind == "fsdp":
        return "fsdp"
    return "SyncBatchNorm" if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()) else None


def _has_own_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and module.training


def _listed(rows: Sequence[Parallel | Batch]) -> str:
    return ", ".join(row.describe() for row in rows)
