"""What every command's end is held against: its exit code, one clear message, nothing raw, no traceback of ours."""

from __future__ import annotations

import re
from collections.abc import Collection

from .core import Complaints
from .ended import Ended

_MOST_LINES = 100
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_LONGEST_LINE = 20_000
_MOST_CPU_S = 5.0
_OURS = ("This is a bug in autotune", "autotune/cli/", "Exception ignored in", "Fatal Python error")


def clean(ended: Ended, codes: Collection[int], *words: str, of_user: bool = False) -> Complaints:
    """Complaints about a command's end.

    Args:
        ended: how it ended.
        codes: documented exit codes of which one is right here.
        words: that it must have said.
        of_user: whether a traceback may be the user's own.
    """
    said = ended.out + ended.err
    found = [] if ended.code in codes else [f"exit {ended.code}, not {_either(codes)}: {ended.last}"]
    found += [f"said {mark!r}" for mark in _OURS if mark in said]
    if not of_user and "Traceback (most recent call last)" in said and not found[1:]:
        found.append("a traceback")
    if control := _CONTROL.search(said):
        found.append(f"a raw control character: {control[0]!r}")
    if len(ended.err.splitlines()) > _MOST_LINES:
        found.append(f"{len(ended.err.splitlines())} lines on stderr")
    if any(len(line) > _LONGEST_LINE for line in ended.err.splitlines()):
        found.append(f"a line of {max(map(len, ended.err.splitlines()))} characters")
    flat = " ".join(said.split())
    return found + [f"did not say {word!r}: {ended.last}" for word in words if word not in flat]


def refused(ended: Ended, *words: str, most_cpu_s: float = _MOST_CPU_S) -> Complaints:
    """Complaints unless the command refused its input: exit 2, a message, no data, at once (by its CPU time)."""
    found = clean(ended, (2,), *words)
    if not ended.err.strip():
        found.append("no message")
    if ended.out.strip() and not ended.out.lstrip().startswith("{"):
        found.append(f"data on stdout: {ended.out.strip()[:60]!r}")
    if ended.cpu_s > most_cpu_s:
        found.append(f"{ended.cpu_s:.0f} s of CPU time")
    return found


def _either(codes: Collection[int]) -> str:
    return " or ".join(map(str, codes))
