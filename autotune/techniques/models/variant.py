"""Variants: smaller models that the task offers in the place of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field

from ...errors import PlanError, TaskError
from ..support.base import Run, Stage
from ..support.facts import Facts
from ..support.lossy import Lossy

if TYPE_CHECKING:
    from torch import nn

_MARK = "_autotune_variant"
"""Where a model that was built for a variant has its name."""


class Variant(Lossy):
    """Train another model that the task offers, such as a narrower one, from its own initial weights."""

    name: ClassVar[str] = "variant"
    not_in_inference: ClassVar[str] = "it is judged after training"
    stage: ClassVar[Stage] = Stage.MODEL
    not_in_scripts: ClassVar[str] = "the script builds its own model"

    kind: str = Field(default="none", min_length=1)
    """``none`` is the model of ``build_model``; otherwise a name in the task's ``variants``."""

    def describe(self, facts: Facts | None = None) -> str:
        """Its name, and how large it is."""
        if self.kind == "none":
            return "the task's own model"
        size = facts.variants.get(self.kind) if facts is not None else None
        return f"variant {self.kind}" + (f" ({size:,} parameters)" if size is not None else "")

    def purpose(self) -> str:
        """What is trained."""
        if self.kind == "none":
            return "Trains the task's own model."
        return "Trains another model that the task offers, from its own initial weights."

    @classmethod
    def offered(cls, facts: Facts) -> Iterable[Self]:
        """All that the task offers."""
        return (cls(kind=name) for name in facts.variants)

    def obstacle(self, facts: Facts) -> str | None:
        """The task must offer it."""
        return None if self.kind in facts.variants else _lacking(self.kind, facts.variants)

    def removed(self, facts: Facts) -> float:
        """Of the parameters."""
        return max(1 - facts.variants.get(self.kind, facts.num_parameters) / facts.num_parameters, 0.0)

    def beyond_script(self) -> str | None:
        """It builds its model itself."""
        if self.kind == "none":
            return None
        return f"variant: the script builds its own model. Build {self.kind} there, and leave the row out."

    def on_task(self, task: Any) -> Any:
        """The task that builds this variant, and loads no ``weights`` into it: they are those of its own model, as
        ``reversible_blocks`` are.

        Raises:
            PlanError: the task does not offer it.
        """
        if self.kind == "none":
            return task
        if self.kind not in task.variants:
            raise PlanError(f"settings.variant.kind: {_lacking(self.kind, task.variants)}. Use kind: none.")
        return replace(task, build_model=partial(_build, task, self.kind), weights=None, reversible_blocks=())

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """The model, which has been built as this.

        Raises:
            PlanError: it has not.
        """
        if self.kind != "none" and vars(model).get(_MARK) != self.kind:
            raise PlanError(
                f"settings.variant: the plan trains the task's variant {self.kind}, and a model that is built already "
                f"cannot become that. Pass autotune.apply a task that has variants, or build {self.kind} yourself and "
                "leave settings.variant out."
            )
        return model


def _lacking(name: str, variants: Iterable[str]) -> str:
    known = f"it has {', '.join(variants)}" if variants else "it has none: variants = {...} in its file offers some"
    return f"the task has no variant {name}; {known}"


def _build(task: Any, name: str) -> nn.Module:
    from torch import nn

    model = task.variants[name]()
    if not isinstance(model, nn.Module):
        raise TaskError(
            f"{task.source or 'task'}: variants[{name!r}] returned {type(model).__name__}. Wanted: a torch.nn.Module."
        )
    setattr(model, _MARK, name)
    return model
