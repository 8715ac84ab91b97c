"""The budget in bytes, from a size or a share of the reference's peak, and whether any configuration can hold it."""

from __future__ import annotations

from ..errors import UserError
from ..plan import Budget
from ..techniques import Facts
from ..units import MIB, ceil_mib, format_bytes, format_percent
from ..workers import Measured, Outcome
from .options import SearchOptions


def asked(options: SearchOptions) -> Budget:
    """The budget as the user gave it."""
    is_share = isinstance(options.budget, float)
    sizes = {"of_reference" if is_share else "limit": options.budget}
    return Budget(
        **sizes,
        host=options.host_budget,
        latency_s=options.max_latency,
        device=options.device,
        margin=options.margin,
    )


def in_bytes(budget: Budget, reference: Outcome) -> Budget:
    """The budget with its limit in whole MiB, rounded down, where it is a share of the reference's measured peak."""
    if budget.of_reference is None or budget.limit is not None or not isinstance(reference, Measured):
        return budget
    limit = int(budget.of_reference * reference.measurement.peak.process) // MIB * MIB
    return budget.model_copy(update={"limit": max(limit, MIB)})


def check_possible(budget: Budget, facts: Facts) -> None:
    """Refuse a budget that no configuration can hold, before any trial.

    Raises:
        UserError: the process takes more than the budget before the model is built.
    """
    limit = budget.of_device
    if limit is None or facts.process_bytes is None or limit >= facts.process_bytes:
        return
    taken = format_bytes(ceil_mib(facts.process_bytes))
    what = f"Python, torch {facts.torch_version} and what the task imports"
    share = ", or a share of what the job takes as it stands, such as --budget 90%" if limit == budget.limit else ""
    helps = f"Give more than that{share}."
    if facts.device.type == "cuda":
        what = "the CUDA context"
    elif not facts.torch_version.endswith("+cpu"):
        helps += " On a CPU, torch's build without CUDA takes some 380 MiB less."
    given = f"--budget {budget_words(budget)}" if limit == budget.limit else f"--host-budget {format_bytes(limit)}"
    raise UserError(
        f"{given}: a process is charged {taken} before the model is built ({what}), so that no "
        f"configuration can stay within the budget. {helps}"
    )


def limits_words(budget: Budget) -> str:
    """``8 GiB, 16 GiB of the host's``, ``none``."""
    hosts = [] if budget.host is None else [f"{format_bytes(budget.host)} of the host's"]
    return ", ".join([*([] if (limit := budget_words(budget)) == "none" else [limit]), *hosts]) or "none"


def budget_words(budget: Budget) -> str:
    """``8 GiB``, ``549 MiB (90% of the reference's peak)``, ``none``."""
    limit = "none" if budget.limit is None else format_bytes(budget.limit)
    if budget.of_reference is None:
        return limit
    share = f"{format_percent(budget.of_reference)} of the reference's peak"
    return share if budget.limit is None else f"{limit} ({share})"
