"""SearchSpace: for each technique, the choices that may be tried. Presets are the YAML files beside this module."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError, create_model

from ..errors import SpaceError
from ..files import read_text
from ..plain_yaml import UNION_TAGS, explain, read_yaml
from ..techniques import TECHNIQUES, Facts, Technique
from ..techniques.parallel import Parallel

__all__ = ["SearchSpace", "Unavailable", "load_space", "presets"]


@dataclass(frozen=True)
class Unavailable:
    """A choice that the space names and that cannot be had here."""

    technique: str
    """The technique's name."""
    setting: Technique
    """The choice."""
    reason: str
    """Why not, in words."""


class _Space(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, populate_by_name=True, title="autotune search space"
    )

    schema_: Literal["autotune/space@1"] = Field(default="autotune/space@1", alias="schema")
    """The format's name and version."""


def _row(kind: type[Technique]) -> tuple[Any, Any]:
    """One field of the model: ``auto``, or a list of ``kind`` and its directive."""

    def only_auto(row: Any) -> Any:
        if row != "auto":
            raise ValueError(f"write `auto`, or a list of choices such as [{kind.written(row)}]")
        return row

    auto = Annotated[Literal["auto"], BeforeValidator(only_auto), Tag(UNION_TAGS[0])]
    explicit: Any = Annotated[tuple[_choice(kind), ...], Field(min_length=1), Tag(UNION_TAGS[1])]  # type: ignore[misc]
    either: Any = Annotated[auto | explicit, Discriminator(lambda row: UNION_TAGS[isinstance(row, list | tuple)])]
    summary = (kind.__doc__ or kind.name).strip().splitlines()[0]  # python -OO has no docstrings
    return either | None, Field(default=None, description=f"{summary} `auto`, or a list of choices.")


def _choice(kind: type[Technique]) -> Any:
    """What a list may hold: settings of ``kind``, or its directive."""
    directive = kind.directive
    if directive is None:
        return kind
    setting, directed = UNION_TAGS[2:]
    return Annotated[
        Annotated[kind, Tag(setting)] | Annotated[type(directive), Tag(directed)],
        Discriminator(lambda one: directed if one in (directive, directive.model_dump()) else setting),
        Field(json_schema_extra=lambda schema: schema.update(anyOf=schema.pop("oneOf"))),
    ]


_fields: dict[str, Any] = {name: _row(kind) for name, kind in TECHNIQUES.items()}
_Rows = create_model("_Rows", __base__=_Space, **_fields)


class SearchSpace(_Rows):  # a row for each technique, whatever techniques there are
    """For each technique ``auto`` or the choices to try; one that is absent stays at the user's own setting."""

    @classmethod
    def from_yaml(cls, text: str, source: str = "space") -> Self:
        """Parse a space's text; ``source`` names it in errors.

        Raises:
            SpaceError: not YAML, not a space, or an unknown technique or value.
        """
        return cls.of(read_yaml(text, source, SpaceError), source)

    @classmethod
    def of(cls, rows: Any, source: str = "space") -> Self:
        """The space of these rows; ``source`` names them in errors.

        Raises:
            SpaceError: an unknown technique or value.
        """
        try:
            return cls.model_validate(rows)
        except ValidationError as error:
            raise SpaceError(explain(error, source, cls)) from None

    def choices(self, facts: Facts) -> dict[str, tuple[Technique, ...]]:
        """What may be tried for this model and device, by technique, without repetition.

        Raises:
            SpaceError: of a technique's choices none can be had.
        """
        missing = self.unavailable(facts)
        found = {}
        for name, wanted in self._wanted(facts).items():
            reasons = [row for row in missing if row.technique == name]
            refused = [row.setting for row in reasons]
            found[name] = tuple(dict.fromkeys(choice for choice in wanted if choice not in refused))
            if not found[name]:
                listed = "; ".join(f"{row.setting.model_dump_json()}: {row.reason}" for row in reasons)
                raise SpaceError(f"space: {name}: at least one available choice is needed, but got {listed}. Use auto.")
        return found

    def unavailable(self, facts: Facts) -> tuple[Unavailable, ...]:
        """Choices that the space names and that cannot be had for this model and device."""
        return tuple(
            Unavailable(name, choice, reason)
            for name, wanted in self._wanted(facts).items()
            for choice in wanted
            if (reason := choice.unavailable(facts)) is not None
        )

    def changes(self) -> dict[str, tuple[Technique, ...]]:
        """Its choices that change what the model computes, by technique; empty where it says `auto`."""
        rows = {name: getattr(self, name) for name, kind in TECHNIQUES.items() if "function" in kind.affects}
        return {name: () if row == "auto" else row for name, row in rows.items() if row is not None}

    @property
    def most_processes(self) -> int:
        """That a choice of it trains in."""
        rows = (row for name in TECHNIQUES if isinstance(row := getattr(self, name), tuple))
        return max((one.processes for row in rows for one in row if isinstance(one, Parallel)), default=1)

    def _wanted(self, facts: Facts) -> dict[str, tuple[Technique, ...]]:
        rows = {name: getattr(self, name) for name in TECHNIQUES}
        return {
            name: TECHNIQUES[name].choices(facts) if row == "auto" else tuple(one.or_default(facts) for one in row)
            for name, row in rows.items()
            if row is not None and name not in facts.left_out
        }


def presets() -> tuple[str, ...]:
    """Names that :func:`load_space` knows without a file."""
    return tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.yaml")))


def load_space(name_or_path: str) -> SearchSpace:
    """Read a search space.

    Args:
        name_or_path: a preset's name, or a YAML file.

    Raises:
        SpaceError: neither a preset nor a file, not YAML, or an unknown technique or value.
    """
    path = Path(__file__).with_name(f"{name_or_path}.yaml") if name_or_path in presets() else Path(name_or_path)
    try:
        text = read_text(path, "search space", SpaceError)
    except FileNotFoundError:
        raise SpaceError(
            f"{name_or_path}: neither a file nor a preset. Write a YAML file, or use one of: {', '.join(presets())}."
        ) from None
    return SearchSpace.from_yaml(text, str(path))
