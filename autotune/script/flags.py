"""The flags by which scripts take their batch, found in a command without placeholders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ..techniques.batch import Batch
from .command import (
    ADD_PATH,
    BATCH,
    EVALUATION,
    TOKENS,
    filled,
    own_batch,
    own_evaluation,
    placeholders,
    under_launcher,
)
from .parsers import bare, counts_tokens, has_both, makes_up_total, stands_for

_WITH_VALUE = re.compile(r"((?:-|\+){0,2}[A-Za-z][\w.-]*=)([1-9]\d*)")
_FLAG, _NUMBER = re.compile(r"--?[A-Za-z][\w.-]*"), re.compile(r"[1-9]\d*")


class Flag(NamedTuple):
    """A flag that is known to take a part of the batch."""

    words: str
    """As it is written: ``-b 32``."""
    marked: str
    """With its placeholder: ``-b {batch.micro=32}``."""
    is_read: bool
    """Whether its value is a whole number."""


def taken(command: Sequence[str]) -> dict[str, tuple[Flag, ...]]:
    """The script's flags that are known to take its batch, by what each stands for, in the order of :data:`BATCH`."""
    start = _own_words(command)
    words, found = _put(command, len(command) if start is None else start, BATCH, numbers_alone=False)

    def flag(place: int, name: str) -> Flag:
        said, marked = [*command[place : place + 2]], words[place : place + 2]
        if "=" in said[0] or said[1:] == [] or said[1].startswith("-"):
            said, marked = said[:1], marked[:1]
        is_read = said != marked
        if not is_read:
            start, equals, _ = said[0].partition("=")
            marked = [f"{start}{equals or ' '}{{{name}=N}}"]
        return Flag(" ".join(said), " ".join(marked), is_read)

    return {name: tuple(flag(place, name) for place in places) for name, places in found.items()}


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
    start = _own_words(command)
    if start is None or placeholders(command) & {*BATCH}:
        return None
    words, found = _put(command, start, BATCH)
    micro = next((command[place].partition("=")[0] for place in found["batch.micro"]), "")
    other = has_both(micro)
    if other is not None and not _states(command[start:], BATCH[1]):
        found["batch.accumulate"].append(len(words))
        words += [other, "{batch.accumulate=1}"]
    num_micro, num_accumulate = (len(places) for places in found.values())
    makes_up = num_accumulate == 0 and makes_up_total(command[start:])
    if num_micro != 1 or not (num_accumulate == 1 or makes_up):
        return None
    stated = own_batch(words)
    assert stated is not None, "it has placeholders"
    is_own = own is None or stated == own or (makes_up and stated.micro == own.micro)
    return words if is_own else None


def with_tokens(command: Sequence[str], flag: str | None = None) -> list[str] | None:
    """The command with placeholders for the tokens of a batch and for accumulation: ``--max-tokens 4096`` becomes
    ``--max-tokens {batch.tokens=4096}``.

    Args:
        command: as the user gave it.
        flag: that a plan names; None is one that is known.

    Returns:
        None where it has placeholders, or not one flag for each with a whole number.
    """
    start = _own_words(command)
    if start is None or placeholders(command) & {*BATCH, TOKENS}:
        return None
    words = command[start:]
    named = bare(flag) if flag is not None else None
    if named is None and counts_tokens(words):
        named = next((bare(word.partition("=")[0]) for word in words if _means(word) == BATCH[0]), None)
    words, found = _put(command, start, (TOKENS, BATCH[1]), tokens=named)
    return words if all(len(places) == 1 for places in found.values()) else None


def _means(word: str) -> str | None:
    return stands_for(word.partition("=")[0])


def states_tokens(words: Sequence[str], batch: Batch) -> bool:
    """Whether a command has a plan's flag for tokens, with the plan's number."""
    assert batch.flag is not None, "it is a plan of tokens"
    named = (_read(words, place) for place in range(len(words)))
    return any(bare(flag) == bare(batch.flag) and value == str(batch.tokens) for flag, value in named if flag)


def with_evaluation(command: Sequence[str]) -> list[str] | None:
    """The command with a placeholder for the evaluation batch that a known flag states: ``--eval-batch-size 8`` becomes
    ``--eval-batch-size {evaluation.batch=8}``; None where it has that placeholder, or not one such flag."""
    start = _own_words(command)
    if start is None or EVALUATION in placeholders(command):
        return None
    words, found = _put(command, start, (EVALUATION,))
    return words if len(found[EVALUATION]) == 1 else None


def _own_words(command: Sequence[str]) -> int | None:
    """Where the script's own words begin; None where Python runs no script."""
    launched = under_launcher(command)
    if launched is None:
        return None
    tail = launched[launched.index("autotune.script") + 1 :]
    return len(command) - len(tail) + (tail[0] == ADD_PATH) + 1


def _put(
    command: Sequence[str], start: int, names: Sequence[str], numbers_alone: bool = True, tokens: str | None = None
) -> tuple[list[str], dict[str, list[int]]]:
    """The command with placeholders of these names in the flags that are known, and where those are; also of flags
    without a whole number, unless ``numbers_alone``. ``tokens`` is a bare name that is taken for the tokens' flag."""
    words: list[str] = list(command)
    found: dict[str, list[int]] = {name: [] for name in names}
    for place in range(start, len(command)):
        flag, value = _read(command, place)
        name = stands_for(flag) if tokens is None or not flag or bare(flag) != tokens else TOKENS
        if name is None or name not in found or (value is None and numbers_alone):
            continue
        found[name].append(place)
        if value is not None:
            at = place if "=" in words[place] else place + 1
            words[at] = words[at].removesuffix(value) + f"{{{name}={value}}}"
    return words, found


def _states(words: Sequence[str], name: str) -> bool:
    return any(stands_for(word.partition("=")[0]) == name for word in words)


def fill(command: Sequence[str], batch: Batch | None, evaluation: int | None = None) -> tuple[list[str], str | None]:
    """A command with a plan's batch in its placeholders or, where it has none, in the flags that are known.

    Args:
        command: as the user gave it.
        batch: that each process trains on; None where the plan states none.
        evaluation: samples that each evaluates at once; None where the plan states none.

    Returns:
        The command, and in words which flags of the user's were changed; None where none was.

    Raises:
        UserError: the plan has no batch for a placeholder, or one that a script cannot be told of.
    """
    guessed = _with_batch(command, batch) if batch is not None and batch.effective is None else None
    words = list(command) if guessed is None or own_batch(guessed) == batch else guessed
    guessed = with_evaluation(words) if evaluation is not None else None
    words = words if guessed is None or own_evaluation(guessed) == evaluation else guessed
    whole = filled(words, batch, evaluation)
    if list(command) in (words, whole):
        return whole, None
    return whole, f"the plan's batch is in the script's own flags: {flags_of(words, whole)}."


def _with_batch(command: Sequence[str], batch: Batch) -> list[str] | None:
    """The command with placeholders for what a plan states of the batch, in the flags that are known; None where it
    has none, or its own."""
    return with_placeholders(command) if batch.flag is None else with_tokens(command, batch.flag)


def is_split_otherwise(command: Sequence[str], batch: Batch | None) -> bool:
    """Whether a plan's batch, put into the flags of a command, is another split of a step than the command's own; also
    where that is not stated.

    Args:
        command: as the user gave it.
        batch: that each process trains on; None where the plan states none.
    """
    if batch is None or batch.accumulate == 1:
        return False
    words = _with_batch(command, batch) or command
    own, names = own_batch(words, batch.num_samples), placeholders(words)
    if own is None:
        return False
    if TOKENS in names:
        return own.tokens != batch.tokens
    return own.micro != batch.micro if BATCH[0] in names else own.accumulate != batch.accumulate


def flags_of(command: Sequence[str], words: Sequence[str] | None = None) -> str:
    """The words that tell the batch: ``--batch-size {batch.micro=32}``.

    Args:
        command: with its placeholders.
        words: the same with a batch in their place; None leaves the placeholders.
    """
    words = command if words is None else words
    found = [
        " ".join(words[place - ("=" not in word.partition("{")[0]) : place + 1])
        for place, word in enumerate(command)
        if placeholders([word])
    ]
    return " ".join(found)


def _read(words: Sequence[str], place: int) -> tuple[str, str | None]:
    """A flag, and its whole number; None where it has none."""
    if match := _WITH_VALUE.fullmatch(words[place]):
        return match[1], match[2]
    if not _FLAG.fullmatch(words[place]):
        name, equals, _ = words[place].partition("=")
        return name if equals else "", None
    number = place + 1 < len(words) and _NUMBER.fullmatch(words[place + 1])
    return words[place], words[place + 1] if number else None
