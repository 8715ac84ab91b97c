"""What the command line's options read from their text."""

from __future__ import annotations

import math

import typer

from ..search.options import Drop
from ..units import MIB, parse_bytes, parse_duration, parse_percent


def read_budget(text: str) -> int:
    """Bytes, at least a MiB."""
    try:
        num_bytes = parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if 0 < num_bytes < MIB:
        raise typer.BadParameter(f"a budget of {text} is {num_bytes} bytes. Was {text}GiB meant?")
    if num_bytes <= 0:
        raise typer.BadParameter(f"a budget of {text} leaves no memory at all. Write for example 8GiB, 512 MiB or 8GB.")
    return num_bytes


def read_device_of_type(text: str) -> str:
    """``cpu``, ``cuda``, or one type of these."""
    from ..workers.devices import split_device

    try:
        split_device(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from None
    return text


def read_budget_or_share(text: str) -> float:
    """Bytes as an int; a share of the reference's peak as a float."""
    if not text.strip().endswith("%"):
        return read_budget(text)
    try:
        return parse_percent(text.strip())
    except ValueError:
        raise typer.BadParameter(
            f"expected a percentage above 0 of what the job takes as it stands, such as 90%, but got {text!r}."
        ) from None


def read_duration(text: str | float) -> float:  # typer parses defaults too
    """Seconds."""
    try:
        return parse_duration(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def read_drop(text: str | Drop) -> Drop:
    """How far a quality may fall: a share of the reference's, or absolute."""
    written = str(text).strip()
    try:
        value = float(written.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise typer.BadParameter(
            f"expected how far evaluate's result may fall, such as 1% of the reference's, or 0.5, but got {text!r}."
        )
    return Drop(value / 100, is_share=True) if written.endswith("%") else Drop(value, is_share=False)


def read_factor(value: float) -> float:
    """Above 0."""
    if not 0 < value < math.inf:
        raise typer.BadParameter(f"must be a number above 0, but got {value:g}; 1 is as the task has it.")
    return value


def read_margin(value: float) -> float:
    """A share, from 0 up to 1."""
    if not 0 <= value < 1:
        raise typer.BadParameter(f"expected a share from 0 up to 1, such as 0.03, but got {value}.")
    return value
