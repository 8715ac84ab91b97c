"""Bytes, durations and ratios as people write them, and any text so that a terminal only shows it.

Only ``cli``, ``report``, ``words``, error messages and the YAML schema use the text forms.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

MIB = 2**20

_UNITS = {
    "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,  # as Docker, Java and ulimit have it
}  # fmt: skip
_SPELLED = ("TiB", "GiB", "MiB", "KiB", "TB", "GB", "MB", "kB")
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*")
_EXAMPLES = "Write for example 8GiB, 512 MiB or 8GB; 8G is 8GiB."
_LONGEST_S = 1e9
_LARGEST_SHARE = 1e6
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def parse_bytes(text: str | float) -> int:
    """Bytes from ``8GiB`` or ``8G`` (2**33), ``8GB`` (8 * 10**9), ``512 MiB`` or a plain number of bytes.

    Raises:
        ValueError: not a number with a known unit.
    """
    if not isinstance(text, (int, float, str)) or isinstance(text, bool):
        raise ValueError(f"not a size: {text!r}. {_EXAMPLES}")
    if isinstance(text, (int, float)):
        if not -(2**63) < text < 2**63:  # NaN neither
            got = f"an integer of {text.bit_length()} bits" if isinstance(text, int) else f"{text!r}"
            raise ValueError(f"not a size: {got}. {_EXAMPLES}")
        return int(text)
    match = _NUMBER.fullmatch(text)
    unit = _UNITS.get((match[2] or "b").lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"not a size: {text[:40]!r}. {_EXAMPLES}")
    num_bytes = float(match[1]) * unit
    if num_bytes >= 2**63:
        raise ValueError(f"not a size that a device has: {text[:40]!r}. {_EXAMPLES}")
    return round(num_bytes)


def format_bytes(num_bytes: int) -> str:
    """The shortest text with at most two decimals that :func:`parse_bytes` reads back to the same number."""
    for unit in _SPELLED:
        size = _UNITS[unit.lower()]
        text = f"{num_bytes / size:.2f}".rstrip("0").rstrip(".")
        if num_bytes >= size and parse_bytes(f"{text} {unit}") == num_bytes and float(text) < 100_000:
            return f"{text} {unit}"
    return f"{num_bytes} B"


def size(num_bytes: int) -> str:
    """Bytes for people, in three or four digits: ``605 MiB``, ``7.61 GiB``."""
    mib = num_bytes / MIB
    if mib < 1:
        return f"{num_bytes / 1024:.0f} KiB" if num_bytes >= 1024 else f"{num_bytes} B"
    if mib < 4096:
        return f"{mib:.0f} MiB" if mib >= 10 else f"{mib:.1f} MiB"
    return f"{mib / 1024:.2f}".rstrip("0").rstrip(".") + " GiB"


def ceil_mib(num_bytes: int) -> int:
    """``num_bytes`` rounded up to whole MiB: what a plan states as a peak, never less than was measured."""
    return -(-num_bytes // MIB) * MIB


def parse_percent(text: str | float) -> float:
    """A share from ``90%`` (0.9) or a plain number (0.9 itself).

    Raises:
        ValueError: not a positive number, or not one of percent.
    """
    match = _NUMBER.fullmatch(text.removesuffix("%")) if isinstance(text, str) and text.endswith("%") else None
    share = round(float(match[1]) / 100, 12) if match and not match[2] else text
    if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 < share <= _LARGEST_SHARE:
        raise ValueError(f"not a percentage above 0: {text!r}. Write for example 90%.")
    return float(share)


def format_percent(share: float) -> str:
    """``90%``: the shortest text that :func:`parse_percent` reads back to the same share."""
    return f"{share * 100:.10g}%"


def parse_duration(text: str) -> float:
    """Seconds from ``90s``, ``20m``, ``1.5h`` or a plain number of seconds.

    Raises:
        ValueError: not a positive number with a known unit.
    """
    match = _NUMBER.fullmatch(text)
    unit = _SECONDS.get(match[2].lower()) if match else None
    if match is None or unit is None or not 0 < float(match[1]) * unit < _LONGEST_S:
        raise ValueError(f"not a duration: {text!r}. Write for example 90s, 20m or 1.5h.")
    return float(match[1]) * unit


def format_duration(seconds: float) -> str:
    """``47 s``, ``3 min 05 s`` or ``2 h 10 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_latency(seconds: float) -> str:
    """``3.127 ms``, ``1.2 s``: four digits of a short time."""
    return f"{seconds:.4g} s" if seconds >= 1 else f"{1000 * seconds:.4g} ms"


def printable(text: str) -> str:
    """Text with what a terminal would act on escaped: its own control sequences, line ends, marks that reorder."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def shortened(text: str, most: int = 80) -> str:
    """The beginning of a text, of so many characters, with nothing that a terminal would act on."""
    return printable(text if len(text) <= most else f"{text[:most]}…")


def slug(text: str) -> str:
    """A text for a file's name."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def _parse_ratio(value: str | float) -> float:
    if not isinstance(value, (int, float, str)) or isinstance(value, bool):
        raise ValueError(f"not a ratio: {value!r}. Write for example 2.31x.")
    try:
        return float(value.removesuffix("x")) if isinstance(value, str) else float(value)
    except (ValueError, OverflowError) as reason:
        raise ValueError(f"not a ratio: {reason}. Write for example 2.31x.") from None


Bytes = Annotated[
    int,
    BeforeValidator(parse_bytes),
    Field(ge=0),
    PlainSerializer(format_bytes, return_type=str, when_used="json"),
    WithJsonSchema({"type": ["string", "integer"], "description": "bytes: 8 GiB is 2**33, 8 GB is 8 * 10**9"}),
]
"""A size in bytes: an int in Python, ``8 GiB`` in YAML."""

Percent = Annotated[
    float,
    BeforeValidator(parse_percent),
    PlainSerializer(format_percent, return_type=str, when_used="json"),
    WithJsonSchema({"type": ["string", "number"], "pattern": r"^[0-9.]+%$"}),
]
"""A share: a float in Python, ``90%`` in YAML."""

Ratio = Annotated[
    float,
    BeforeValidator(_parse_ratio),
    Field(ge=0, allow_inf_nan=False),
    PlainSerializer(lambda value: f"{value!r}x", return_type=str, when_used="json"),
    WithJsonSchema({"type": ["string", "number"], "pattern": r"^[0-9.]+(e[-+]?[0-9]+)?x$"}),
]
"""A ratio: a float in Python, ``2.31x`` in YAML."""
