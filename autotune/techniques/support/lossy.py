"""Techniques that change the model's function: off until a search is told how far quality may fall."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import ClassVar, Self

from pydantic import model_validator

from .base import Effect, Exactness, Technique
from .facts import Facts

NOT_ALLOWED = "it changes what the model computes, which --max-quality-drop allows"


class Affects:
    """What settings affect, where some kinds of a technique change the function and others do not."""

    def __init__(self, others: Set[Effect], lossy: Set[str | None]) -> None:
        """
        Args:
            others: what each affects.
            lossy: kinds that change the function too; None is the class, whose kind is not chosen.
        """
        self._others, self._lossy = frozenset(others), lossy

    def __get__(self, setting: Technique | None, owner: type) -> frozenset[Effect]:
        is_lossy = getattr(setting, "kind", None) in self._lossy
        return self._others | {"function"} if is_lossy else self._others


class Lossy(Technique):
    """``kind: none`` leaves the model as it is; with any other it computes something else."""

    affects: ClassVar[frozenset[Effect]] = frozenset({"tensors", "update", "function"})

    not_in_scripts: ClassVar[str] = "the script's optimizer holds all parameters before it could cut any"

    kind: str = "none"

    @model_validator(mode="after")
    def _check_none_is_alone(self) -> Self:
        if self.kind == "none" and (given := self.model_dump(exclude_defaults=True)):
            raise ValueError(f"kind: none does nothing, but got {', '.join(given)}. Name the kind that they are of.")
        return self

    @classmethod
    def choices(cls, facts: Facts) -> tuple[Self, ...]:
        """The model as it is, and what is offered and can be had."""
        return (cls(), *(one for one in cls.offered(facts) if one.unavailable(facts) is None))

    @classmethod
    def offered(cls, facts: Facts) -> Iterable[Self]:
        """Settings that are worth trying."""
        raise NotImplementedError

    def exactness(self, facts: Facts) -> Exactness:
        """Another function."""
        return "exact" if self.kind == "none" else "lossy"

    def unavailable(self, facts: Facts) -> str | None:
        """It must be allowed, and nothing in its way."""
        if self.kind != "none" and not facts.allow_lossy:
            return NOT_ALLOWED
        if self.kind == "none":
            return None
        return facts.refused.get(self.model_dump_json(exclude_defaults=True)) or self.obstacle(facts)

    def beyond_script(self) -> str | None:
        """Its optimizer has been built from the model as it was."""
        if self.kind == "none":
            return None
        return (
            f"{self.name} takes parameters away, which the script's optimizer would still hold. Call "
            "autotune.apply_to_model(plan, model) in the script, before the optimizer is built."
        )

    def obstacle(self, facts: Facts) -> str | None:
        """What else is in the way of a setting other than ``kind: none``, in words."""
        raise NotImplementedError
