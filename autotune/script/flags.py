"""The flags by which scripts take their batch, found in a command without placeholders."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..techniques.batch import Batch
from .command import ADD_PATH, BATCH, filled, own_batch, placeholders, under_launcher

__all__ = ["flags_of", "told", "with_placeholders"]

_HUGGING_FACE = "per_device_train_batch_size"
"""Its parser takes ``--gradient_accumulation_steps`` too, which is 1 where it is left out."""
_NAMES = {
    "batch.micro": (
        "b",
        "bs",
        "batch_size",
        "micro_batch_size",
        "device_batch_size",
        "train_batch_size",
        _HUGGING_FACE,
    ),
    "batch.accumulate": (
        "accum_iter",
        "accum_steps",
        "accumulate",
        "accumulate_grad_batches",
        "accumulation_steps",
        "grad_accum",
        "grad_accum_steps",
        "gradient_accumulation_steps",
    ),
}
"""What known parsers call them, without dashes, ``-`` as ``_``, and less what stands before a dot."""
_WITH_VALUE = re.compile(r"(-{0,2}[A-Za-z][\w.-]*=)([1-9]\d*)")
_FLAG, _NUMBER = re.compile(r"--?[A-Za-z][\w.-]*"), re.compile(r"[1-9]\d*")


def with_placeholders(command: Sequence[str], own: Batch | None = None) -> list[str] | None:
    """The command with placeholders for the batch that its known flags state: ``--batch_size=12`` becomes
    ``--batch_size={batch.micro=12}``.

    Args:
        command: as the user gave it.
        own: what the script was seen to train with; flags that state something else are not the batch's.

    Returns:
        None where it has placeholders, or not one known flag each of micro-batch and accumulation.
    """
    launched = under_launcher(command)
    if launched is None or placeholders(command):
        return None
    tail = launched[launched.index("autotune.script") + 1 :]
    start, words = len(command) - len(tail) + (tail[0] == ADD_PATH) + 1, list(command)
    found: dict[str, list[int]] = {name: [] for name in BATCH}
    for place in range(start, len(words)):
        flag, value = _read(words, place)
        for name in BATCH:
            if value is not None and flag in _NAMES[name]:
                at = place if "=" in words[place] else place + 1
                words[at] = words[at].removesuffix(value) + f"{{{name}={value}}}"
                found[name].append(place)
                if flag == _HUGGING_FACE and not _states(command[start:], "batch.accumulate"):
                    found["batch.accumulate"].append(place)
                    words += ["--gradient_accumulation_steps", "{batch.accumulate=1}"]
    if any(len(places) != 1 for places in found.values()):
        return None
    return words if own is None or own_batch(words) == own else None


def told(command: Sequence[str], batch: Batch | None) -> tuple[list[str], str | None]:
    """A command with a plan's batch in its placeholders or, where it has none, in the flags that are known.

    Returns:
        The command, and in words which flags of the user's were changed; None where none was.

    Raises:
        UserError: the plan has no batch for a placeholder, or one that a script cannot be told of.
    """
    guessed = with_placeholders(command) if batch is not None and batch.effective is None else None
    if guessed is None or own_batch(guessed) == batch:
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
    """A flag's bare name, and its whole number; None where it is none."""
    if match := _WITH_VALUE.fullmatch(words[place]):
        return _bare(match[1].removesuffix("=")), match[2]
    if _FLAG.fullmatch(words[place]) and place + 1 < len(words) and _NUMBER.fullmatch(words[place + 1]):
        return _bare(words[place]), words[place + 1]
    return "", None


def _bare(flag: str) -> str:
    return flag.rpartition(".")[2].lstrip("-").replace("-", "_")


def _states(words: Sequence[str], name: str) -> bool:
    return any(_bare(word.partition("=")[0]) in _NAMES[name] for word in words)
