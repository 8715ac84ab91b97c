"""A search's options on the command line, made of the fields that declare them; and help by panels."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Collection
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from annotated_types import Ge, Le
from pydantic import AfterValidator, BaseModel, BeforeValidator, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from ..searches.options import Panel, Shown, option_name

_PANELS = get_args(Panel)
"""In the order that ``--help`` shows them."""


def takes_options(
    *models: type[BaseModel],
    only: Collection[str] | None = None,
    without: Collection[str] = (),
    several: Collection[str] = (),
) -> Callable[[Callable[..., None]], Any]:
    """Give a command an option for each field that says how it is shown.

    Args:
        *models: declare the options.
        only: fields that this command offers; None is all of them.
        without: fields that it does not offer.
        several: fields of which it takes several values, with commas between them: ``given`` has the text.

    Returns:
        A decorator. The command's parameter ``given`` gets a dictionary of what the models can be made of: values of
        fields, or text that is known to be readable.
    """
    declared = {name: model for model in models for name, field in model.model_fields.items() if _shown(field)}
    found = {
        name: _option(model, name, name in several)
        for name, model in declared.items()
        if name not in without and (only is None or name in only)
    }

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def called(**values: Any) -> None:
            given = {name: value for name in found if (value := values.pop(name)) is not None}
            command(**values, given=given)

        own = [each for each in inspect.signature(command, eval_str=True).parameters.values() if each.name != "given"]
        ours = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in found.items()
        ]
        called.__signature__ = inspect.Signature([*own, *ours])  # type: ignore[attr-defined]
        return called

    return decorate


def _option(model: type[BaseModel], name: str, takes_several: bool = False) -> tuple[Any, Any]:
    """An option as typer has it: an annotated type, and the default."""
    field = model.model_fields[name]
    shown, kind, rules = _shown(field), *_bare(field)
    assert shown is not None, f"{name} says how it is shown"
    is_text = kind is not Path and any(isinstance(rule, BeforeValidator) for rule in rules)
    check = _checked(model, name, takes_several)
    least: Any = next((rule.ge for rule in rules if isinstance(rule, Ge)), None)
    most: Any = next((rule.le for rule in rules if isinstance(rule, Le)), None)
    is_yes_or_no = kind is bool and field.default is None  # neither is a third answer
    info = typer.Option(
        option_name(name) + (f"/--no-{option_name(name)[2:]}" if is_yes_or_no else ""),
        *shown.short,
        help=" ".join((field.description or "").split()),
        metavar=f"{shown.metavar}[,...]" if takes_several else shown.metavar,
        parser=check if is_text else None,
        callback=check if not is_text and any(isinstance(rule, AfterValidator) for rule in rules) else None,
        show_default=shown.default or True,
        rich_help_panel=shown.panel,
        min=least,
        max=most,
    )
    kind = str if is_text else kind
    is_told_in_words = is_text or shown.default is not None or field.default is None
    return Annotated[kind | None if is_told_in_words else kind, info], None if is_told_in_words else field.default


def _shown(field: FieldInfo) -> Shown | None:
    return next((rule for rule in field.metadata if isinstance(rule, Shown)), None)


def _bare(field: FieldInfo) -> tuple[Any, list[Any]]:
    """The type without None, and all that is said of it."""
    kind, rules = field.annotation, list(field.metadata)
    if type(None) in get_args(kind):
        kind = next(each for each in get_args(kind) if each is not type(None))
    if get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        rules += more
    return kind, rules


def _checked(model: type[BaseModel], name: str, takes_several: bool) -> Callable[[Any], Any]:
    """A function that returns its value, once ``model`` is known to read it, or each part between commas."""
    field = model.model_fields[name]
    adapter = TypeAdapter[Any](Annotated[(field.annotation, *field.metadata)])  # type: ignore[arg-type]

    def check(value: Any) -> Any:
        try:
            for one in value.split(",") if takes_several and isinstance(value, str) else [value]:
                adapter.validate_python(one)
        except ValidationError as error:
            raise typer.BadParameter(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
        return value

    return check


_ALONE = {"--card": ("all", re.compile(r"(?!-)(?!.*\.py\b).+")), "--lora": ("8", re.compile(r"[0-9]+"))}
"""Options whose value may be left out: what it is then, and what can be one."""


class MayBeAlone(TyperCommand):
    """A command whose ``--card`` and ``--lora`` may stand alone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give such an option its value, where what follows is none."""
        found = []
        for word, follows in itertools.zip_longest(args, args[1:], fillvalue=""):
            found.append(word)
            if word in _ALONE and not _ALONE[word][1].fullmatch(follows):
                found.append(_ALONE[word][0])
        return super().parse_args(ctx, found)


class ByPanel(TyperCommand):
    """A command whose help groups its options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then each panel."""
        panels = ["Arguments", *_PANELS, "Options"]

        def place(parameter: Any) -> int:
            if parameter.param_type_name == "argument":
                return 0
            return panels.index(parameter.rich_help_panel or "Options")

        for number, found in groupby(sorted(self.get_params(ctx), key=place), key=place):
            if rows := [row for each in found if (row := each.get_help_record(ctx)) is not None]:
                with formatter.section(panels[number]):
                    formatter.write_dl(rows)
