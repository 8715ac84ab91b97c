"""Embeddings whose gradient has only the rows that a batch used, and optimizers that update those rows alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ...errors import PlanError
from ...units import MIB
from .apart import step_of, update_apart
from .base import Run, Stage, Technique
from .facts import Facts

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from .. import Settings

LEAST_ROWS = 10_000
"""Of a table that is worth it: batches use each row of a smaller one too often."""
_LEAST_BYTES = 32 * MIB
"""Tables that take less are no reason to trace every combination once more."""
_NUMBER_BYTES = 4
"""In fp32."""
_NO_TABLE = "the model has no embedding that trains"


def facts_of_tables(model: nn.Module) -> Mapping[str, Any]:
    """How large the tables are whose gradient could be sparse; if there are none, why."""
    found = [*_embeddings(model, LEAST_ROWS)]
    numbers = sum(one.numel() for _, module, reason in found if reason is None for one in module.parameters())
    return {"table_numbers": numbers, "no_table": None if numbers else next((one for *_, one in found), _NO_TABLE)}


def is_worth(facts: Facts) -> bool:
    """Whether the tables are large."""
    return facts.table_numbers * _NUMBER_BYTES >= _LEAST_BYTES


def obstacle(facts: Facts) -> str | None:
    """What keeps a job's gradients dense, in words; None where nothing does."""
    if facts.table_numbers == 0:
        return facts.no_table or _NO_TABLE
    if facts.shared_by != "none":
        return _OF_RANKS
    return None if facts.max_grad_norm is None else _OF_CLIPPING


_OF_RANKS = "several processes exchange dense gradients"
_OF_CLIPPING = "torch does not clip the norm of sparse gradients"


def _embeddings(model: nn.Module, least_rows: int) -> Iterator[tuple[str, nn.Module, str | None]]:
    """A model's embeddings by name, and why the gradient of one cannot be sparse; None where it can."""
    from torch import nn

    uses = Counter(id(one) for module in model.modules() for one in module.parameters(recurse=False))
    for name, module in model.named_modules():
        kind = next((kind for kind in (nn.Embedding, nn.EmbeddingBag) if isinstance(module, kind)), None)
        if kind is None:
            continue
        weight = module.weight
        if type(module).forward is not kind.forward or not isinstance(weight, nn.Parameter):
            yield name, module, f"{name} has a forward pass or a weight of its own kind"
        elif not weight.requires_grad or module.sparse:
            yield name, module, f"{name} is {'sparse already' if module.sparse else 'frozen'}"
        elif uses[id(weight)] > 1:
            yield name, module, f"{name} shares its weight with another layer, whose gradient is dense"
        elif module.max_norm is not None:
            yield name, module, f"{name} has max_norm, which changes rows in the forward pass"
        elif module.scale_grad_by_freq or getattr(module, "mode", "sum") == "max":
            yield name, module, f"{name} has {'mode: max' if not module.scale_grad_by_freq else 'scale_grad_by_freq'}"
        elif len(weight) < least_rows:
            yield name, module, f"{name} has {len(weight):,} rows, fewer than least_rows = {least_rows:,}"
        else:
            yield name, module, None


def classes_obstacle(optimizer: torch.optim.Optimizer, classes: Collection[str]) -> str | None:
    """Why an optimizer is none of these classes of torch's, in words."""
    import torch

    name = type(optimizer).__name__
    if name in classes and type(optimizer) is getattr(torch.optim, name):
        return None
    return f"it takes torch's {' or '.join(classes)}, but got {name}"


class Rows(Technique):
    """Gradients of tables have the rows that a batch used, and an optimizer updates those alone."""

    goes_by: ClassVar[str | None] = "optimizer state"
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    not_in_scripts: ClassVar[str] = "the script may clip or read gradients, which would be sparse"

    if TYPE_CHECKING:  # fields of each
        kind: str
        least_rows: int

    def in_way_of(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Why an optimizer would not leave other rows alone, in words; None where it would."""
        raise NotImplementedError

    @property
    def is_on(self) -> bool:
        """Whether it does anything."""
        return bool(self.kind != type(self).model_fields["kind"].default)

    def conflicts(self, settings: Settings) -> str | None:
        """What wants dense gradients."""
        if not self.is_on:
            return None
        if settings.parallel.kind != "none":
            return f"{_OF_RANKS}: use kind: none for parallel"
        if settings.optimizer_step.kind != "after_backward":
            return "rows are updated once backward has ended: use kind: after_backward for optimizer_step"
        if settings.optimizer_state.kind != "default":
            return "state in fewer bits is of whole tables: use kind: default for optimizer_state"
        if any(one.scales_loss for one in settings.techniques()):
            return "the loss scaler was not tried with gradients of rows: use bf16"
        return None

    def undo(self, model: nn.Module) -> nn.Module:
        """Gradients become dense again."""
        for module in model.modules():
            if module.__dict__.pop("_autotune_rows", False):
                module.sparse = False  # type: ignore[assignment]
        return model

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """Have gradients of large tables be sparse.

        Raises:
            PlanError: the model has no table that could.
        """
        found = [*_embeddings(model, self.least_rows)] if self.is_on else []
        able = [module for _, module, reason in found if reason is None]
        if self.is_on and not able:
            reason = next((reason for *_, reason in found), _NO_TABLE)
            raise PlanError(f"settings.{self.name}: {reason}. Leave that row out.")
        for module in able:
            module.sparse = module._autotune_rows = True  # type: ignore[assignment]
        return model

    def on_optimizer(
        self, optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None
    ) -> torch.optim.Optimizer:
        """Have it update, of a table with a sparse gradient, the rows that are in it, by its own class. It stays the
        object that schedulers, checkpoints and hooks know, and its state as its class has it. What an earlier plan did
        is off by now: the state's own row is before this one, and has all parameters gathered.

        Raises:
            PlanError: the optimizer would move other rows too, or gradients are clipped.
        """
        if not self.is_on:
            return optimizer
        reason = self.in_way_of(optimizer) or (None if max_grad_norm is None else _OF_CLIPPING)
        if reason is not None:
            raise PlanError(f"settings.{self.name}: {reason}. Leave that row out.")
        update_apart(optimizer, optimizer, _has_rows, _updated)
        return optimizer


def _has_rows(parameter: Tensor) -> bool:
    return parameter.grad is not None and parameter.grad.is_sparse


def _updated(
    alone: torch.optim.Optimizer, group: dict[str, Any], table: Tensor, state: dict[str, Any]
) -> dict[str, Any]:
    """Update the rows of a table that are in its gradient; its state after that."""
    import torch

    assert table.grad is not None, "else nothing calls this"
    gradient = table.grad.coalesce()
    (places,) = gradient.indices()
    rows = table.detach().index_select(0, places)
    rows.grad = gradient.values()
    tables = {name: one for name, one in state.items() if getattr(one, "shape", None) == table.shape}
    others = {name: one for name, one in state.items() if name not in tables}
    after = step_of(alone, group, rows, others | {name: one.index_select(0, places) for name, one in tables.items()})
    table.index_copy_(0, places, rows)
    for name in [name for name, one in after.items() if getattr(one, "shape", None) == rows.shape]:
        if name not in tables:
            tables[name] = torch.zeros_like(table)
        tables[name].index_copy_(0, places, after.pop(name))
    return {**after, **tables}
