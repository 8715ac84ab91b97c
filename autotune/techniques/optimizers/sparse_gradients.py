"""Sparse gradients: of an embedding's table, only the rows that a batch used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from ..support.base import Effect
from ..support.facts import Facts
from ..support.rows import LEAST_ROWS, Rows, classes_obstacle, facts_of_tables, is_worth, obstacle

if TYPE_CHECKING:
    import torch
    from torch import nn

_CLASSES = ("SGD", "Adagrad")
"""Which leave a row alone whose gradient is 0, unless they are set to more."""
_MOVES = ("momentum", "weight_decay")
"""What moves it then."""


class SparseGradients(Rows):
    """Whether an embedding's gradient is a whole table, mostly zeros, or the rows that a batch used.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.Embedding.html
    """

    name: ClassVar[str] = "sparse_gradients"
    not_in_inference: ClassVar[str] = "there are no gradients"
    affects: ClassVar[frozenset[Effect]] = frozenset({"tensors", "update"})
    purposes: ClassVar[Mapping[str, str]] = {
        "sparse": "Makes and updates only the rows of an embedding that a batch used; the others would not change.",
    }

    kind: Literal["dense", "sparse"] = "dense"
    """``dense`` is as the job has it; ``sparse`` is for SGD and Adagrad without momentum and weight decay."""
    least_rows: int = Field(default=LEAST_ROWS, ge=1)
    """Tables with fewer rows keep their dense gradient."""

    def describe(self, facts: Facts | None = None) -> str:
        """``sparse gradients of embeddings``."""
        return f"{self.kind} gradients of embeddings"

    @classmethod
    def facts_of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, device_type: str) -> Mapping[str, Any]:
        """How large tables are, and whether the optimizer leaves rows alone."""
        return {**facts_of_tables(model), "moves_rows": _moves_rows(optimizer)}

    @classmethod
    def choices(cls, facts: Facts) -> tuple[SparseGradients, ...]:
        """Both where the optimizer leaves rows alone, and tables are large."""
        other = cls(kind="sparse")
        return (cls(), other) if is_worth(facts) and other.unavailable(facts) is None else (cls(),)

    def unavailable(self, facts: Facts) -> str | None:
        """It takes tables, and an optimizer that leaves alone what has no gradient."""
        return None if self.kind == "dense" else obstacle(facts) or facts.moves_rows

    def beyond_script(self) -> str | None:
        """Nobody knows what a loop does with gradients."""
        if self.kind == "dense":
            return None
        return (
            "sparse_gradients: the script may clip or read gradients, which would be sparse. Build nn.Embedding with "
            "sparse=True in a script that does neither, or leave that row out."
        )

    def in_way_of(self, optimizer: torch.optim.Optimizer) -> str | None:
        """It moves rows whose gradient is 0."""
        return _moves_rows(optimizer)


def _moves_rows(optimizer: torch.optim.Optimizer) -> str | None:
    """Why it also moves rows whose gradient is 0, in words; None where it does not."""
    found = (name for group in optimizer.param_groups for name in _MOVES if group.get(name))
    moving = next((f"{name} moves rows that a batch does not use" for name in found), None)
    return classes_obstacle(optimizer, _CLASSES) or moving
