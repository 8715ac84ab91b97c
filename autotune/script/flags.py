"""The flags by which scripts take their batch, found in a command without placeholders."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..techniques.batch import Batch
from .command import ADD_PATH, BATCH, filled, own_batch, placeholders, under_launcher
from .parsers import has_both, makes_up_total, stands_for

__all__ = ["flags_of", "told", "with_placeholders"]

_WITH_VALUE = re.compile(r"((?:-|\+){0,2}[A-Za-z][\w.-]*=)([1-9]\d*)")
_FLAG, _NUMBER = re.compile(r"--?[A-Za-z][\w.-]*"), re.compile(r"[1-9]\d*")


def with_placeholders(command: Sequence[str], own: Batch | None = None) -> list[str] | None:
    """The command with placeholders for the batch that its known flags state: ``--batch_size=12`` becomes
    ``--batch_size={batch.micro=12}``.

    Args:
        command: as the user gave it.
        own: what the script was seen to train with; flags that state something else are not the batch's.

    Returns:
        None where it has placeholders, or not one known flag each of micro-batch and accumulation. Where a script makes
        up a total by itself, no flag is wanted for accumulation.
    """
    launched = under_launcher(command)
    if launched is None or placeholders(command):
        return None
    tail = launched[launched.index("autotune.script") + 1 :]
    start, words = len(command) - len(tail) + (tail[0] == ADD_PATH) + 1, list(command)
    found: dict[str, list[int]] = {name: [] for name in BATCH}
    for place in range(start, len(command)):
        flag, value = _read(command, place)
        name = stands_for(flag)
        if name is None or value is None:
            continue
        at = place if "=" in words[place] else place + 1
        words[at] = words[at].removesuffix(value) + f"{{{name}={value}}}"
        found[name].append(place)
        other = has_both(flag)
        if other is not None and not _states(command[start:], "batch.accumulate"):
            found["batch.accumulate"].append(place)
            words += [other, "{batch.accumulate=1}"]
    micro, accumulate = (len(places) for places in found.values())
    makes_up = accumulate == 0 and makes_up_total(command[start:])
    if micro != 1 or not (accumulate == 1 or makes_up):
        return None
    stated = own_batch(words)
    assert stated is not None, "it has placeholders"
    is_own = own is None or stated == own or (makes_up and stated.micro == own.micro)
    return words if is_own else None


def told(command: Sequence[str], batch: Batch | None) -> tuple[list[str], str | None]:
    """A command with a plan's batch in its placeholders or, where it has none, in the flags that are known.

    Returns:
        The command, and in words which flags of the user's were changed; None where none was.

    Raises:
        UserError: the plan has no batch for a placeholder, or one that a script cannot be told of.
    """
    guessed = with_placeholders(command) if batch is not None and batch.effective is None else None
    if guessed is None or own_batch(guessed) == batch or filled(guessed, batch) == list(command):
        return filled(command, batch), None
    return filled(guessed, batch), f"the plan's batch is in the script's own flags: {flags_of(guessed, batch)}."


def flags_of(command: Sequence[str], batch: Batch | None = None) -> str:
    """The words that tell the batch, with their placeholders or a batch in them: ``--batch-size {batch.micro=32}``."""
    words = filled(command, batch) if batch is not None else list(command)
    found = [
        " ".join(words[place - ("=" not in word.partition("{")[0]) : place + 1])
        for place, word in enumerate(command)
        if placeholders([word])
    ]
    return " ".join(found)


def _read(words: Sequence[str], place: int) -> tuple[str, str | None]:
    """A flag, and its whole number; None where it is none."""
    if match := _WITH_VALUE.fullmatch(words[place]):
        return match[1], match[2]
    if _FLAG.fullmatch(words[place]) and place + 1 < len(words) and _NUMBER.fullmatch(words[place + 1]):
        return words[place], words[place + 1]
    return "", None


def _states(words: Sequence[str], name: str) -> bool:
    return any(stands_for(word.partition("=")[0]) == name for word in words)
