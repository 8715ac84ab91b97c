"""Lazy Adam: of an embedding's table, only the rows that a batch used are updated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field

from ..support.facts import Facts
from ..support.lossy import Lossy
from ..support.rows import LEAST_ROWS, Rows, classes_obstacle, is_worth, obstacle

if TYPE_CHECKING:
    import torch

_CLASSES = ("Adam", "AdamW")


class LazyAdam(Rows, Lossy):
    """Update by Adam or AdamW only the rows of an embedding that a batch used.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.optim.SparseAdam.html
    """

    name: ClassVar[str] = "lazy_adam"
    not_in_inference: ClassVar[str] = "there is no optimizer"
    purposes: ClassVar[Mapping[str, str]] = {
        "none": "Updates every row of an embedding at each step.",
        "rows": "Updates only the rows of an embedding that a batch used: averages and weight decay leave the others "
        "alone.",
    }

    kind: Literal["none", "rows"] = "none"
    """``none`` is as the job has it; ``rows`` is for Adam and AdamW."""
    least_rows: int = Field(default=LEAST_ROWS, ge=1)
    """Tables with fewer rows are updated whole."""

    def describe(self, facts: Facts | None = None) -> str:
        """``lazy Adam for embeddings``."""
        return "Adam for all rows of embeddings" if self.kind == "none" else "lazy Adam for embeddings"

    @classmethod
    def offered(cls, facts: Facts) -> Iterable[Self]:
        """Where tables are large."""
        return (cls(kind="rows"),) if is_worth(facts) else ()

    def obstacle(self, facts: Facts) -> str | None:
        """It takes tables, and Adam."""
        is_adam = facts.optimizer in _CLASSES
        return obstacle(facts) or (None if is_adam else f"it takes torch's Adam or AdamW, but got {facts.optimizer}")

    def beyond_script(self) -> str | None:
        """Nobody knows what a loop does with gradients."""
        if self.kind == "none":
            return None
        return (
            "lazy_adam: the script may clip or read gradients, which would be sparse. Call autotune.apply_to_model and "
            "autotune.apply_to_optimizer in a script that does neither, or leave that row out."
        )

    def in_way_of(self, optimizer: torch.optim.Optimizer) -> str | None:
        """It is none of these classes."""
        return classes_obstacle(optimizer, _CLASSES)
