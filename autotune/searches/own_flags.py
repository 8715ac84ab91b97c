"""The batches of a script: by the placeholders of its command, or by its own flags, where they are known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..script.command import BATCH, own_evaluation, placeholders
from ..script.flags import Flag, flags_of, taken, with_evaluation, with_placeholders
from ..script.parsers import makes_up_total
from ..search_spaces import SearchSpace
from ..techniques import Facts
from ..techniques.batch import Batch
from .events import Warned
from .options import SearchOptions

_MEANINGS = {
    "batch.micro": "the micro-batch",
    "batch.accumulate": "accumulation (backward passes in an optimizer step)",
}


def by_own_flags(options: SearchOptions, facts: Facts) -> tuple[SearchOptions, Facts]:
    """Put placeholders into the command, where its flags state just what the script was seen to train with, and where
    one states what it evaluates with.

    Returns:
        Options and facts, with the batches searched where they can be; what is to be said of that is in the facts'
        ``warnings``, and in their ``left_out`` why the batch stays as it is.
    """
    if options.command is None:
        return options, facts
    found, batch, left_out = list(options.command), None, dict(facts.left_out)
    own = Batch.reference(facts).share(facts.ranks)
    if (reason := batch_stays(options, own)) is not None:
        left_out = {"batch": reason, **left_out}
    if options.flags != "off":
        batch = None if "batch" in left_out else with_placeholders(found, own)
        found = with_evaluation(batch or found) or batch or found
    facts = facts.model_copy(update={"left_out": left_out, "evaluation_batch": own_evaluation(found)})
    if found == list(options.command):
        return options, facts
    what = "evaluation batch" if batch is None else "batch"
    said = f"the {what} is searched through flags of the script: {flags_of(found)}. --flags off leaves them alone."
    facts = facts.model_copy(update={"warnings": (*facts.warnings, said)})
    return options.model_copy(update={"command": tuple(found)}), facts


def told_early(options: SearchOptions, space: SearchSpace) -> Iterator[Warned]:
    """What is to be said of a script's flags before the script is read, which may take long."""
    if getattr(space, "batch", None) is not None and (reason := batch_stays(options)) is not None:
        yield Warned(f"batch stays as it is: {reason}.")


def batch_stays(options: SearchOptions, own: Batch | None = None) -> str | None:
    """Why a search leaves a script's batch as it is, and what to write instead.

    Args:
        options: with the command.
        own: what each process of the script was seen to train with; None before it was seen.

    Returns:
        None where the batch is searched, where there is no script, and where only ``own`` tells.
    """
    command = options.command
    if command is None:
        return None
    if placed := placeholders(command) & {*BATCH}:
        return _one_is_missing(command, placed, own)
    flags = taken(command)
    if options.flags == "off":
        return f"--flags off, and the command has no placeholders, such as {_written(command, flags)}"
    if with_placeholders(command) is None:
        say = "Where the script has flags for both, say which they are, with today's numbers"
        say = "Say which it is, with today's number" if makes_up_total(command) else say
        return f"{_why_unknown(command, flags)}. {say}: {_written(command, flags)}"
    if own is None or with_placeholders(command, own) is not None:
        return None
    stated = " ".join(each.words for found in flags.values() for each in found)
    return (
        f"{stated}: the script was seen to train with another, {own.micro} × {own.accumulate} (micro-batch × backward "
        f"passes in an optimizer step). Where other flags say these, write them so: --NAME {{batch.micro={own.micro}}} "
        f"--NAME {{batch.accumulate={own.accumulate}}}"
    )


def _written(command: Sequence[str], flags: Mapping[str, Sequence[Flag]]) -> str:
    """A command's flags as they would be with placeholders; where it has no such flag, with a name to be filled in."""
    unknown = {"batch.micro": "--NAME {batch.micro=N}", "batch.accumulate": "--NAME {batch.accumulate=1}"}
    return " ".join(flags[name][0].marked if flags[name] else unknown[name] for name in _wanted(command))


def _wanted(command: Sequence[str]) -> Sequence[str]:
    """A script that accumulates up to a total is told its micro-batch alone."""
    return BATCH[:1] if makes_up_total(command) else BATCH


def _one_is_missing(command: Sequence[str], placed: frozenset[str], own: Batch | None) -> str | None:
    """Why one placeholder alone is not enough; None where a script accumulates by itself, as it may before it is
    seen."""
    missing = [name for name in _wanted(command) if name not in placed]
    by_itself = own is None or own.accumulate > 1
    if not missing or (missing == ["batch.accumulate"] and by_itself):
        return None
    return (
        f"the command has {{{min(placed)}}} alone. Write {{{missing[0]}=N}} too, into the flag for "
        f"{_MEANINGS[missing[0]]}, with today's number for N"
    )


def _why_unknown(command: Sequence[str], flags: Mapping[str, Sequence[Flag]]) -> str:
    """What is missing, or too much, of a command without placeholders."""
    for name, found in flags.items():
        if len(found) > 1:
            return f"{' and '.join(each.words for each in found)} may each be {_MEANINGS[name]}"
        if found and not found[0].is_read:
            return f"{found[0].words} states no whole number for {_MEANINGS[name]}"
    known = "".join(f"{found[0].words} is taken for {_MEANINGS[name]}, but " for name, found in flags.items() if found)
    missing = " or ".join(_MEANINGS[name] for name in _wanted(command) if not flags[name])
    return f"{known}no flag for {missing} is known"
