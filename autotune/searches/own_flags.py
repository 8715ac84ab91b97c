"""The batches of a script: by the placeholders of its command, or by its own flags, where they are known. A flag of
tokens is proven by a second look at another number, such as half."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ..errors import NothingFits, TaskError
from ..script.command import BATCH, TOKENS, filled, own_batch, own_evaluation, placeholders
from ..script.flags import Flag, flags_of, taken, with_evaluation, with_placeholders, with_tokens
from ..script.parsers import makes_up_total
from ..search_spaces import SearchSpace
from ..techniques import Facts
from ..techniques.batch import OTHER_TOKENS, Batch
from .event_base import Event
from .events import Warned
from .options import SearchOptions

_MEANINGS = {
    "batch.micro": "the micro-batch",
    "batch.accumulate": "accumulation (backward passes in an optimizer step)",
}


def may_be_in_tokens(options: SearchOptions) -> bool:
    """Whether the command has a flag for the tokens of a batch that a search may change: more of its batches are then
    looked at."""
    return options.allow_split and _with_tokens(options) is not None


def _with_tokens(options: SearchOptions) -> list[str] | None:
    """The command with its placeholder for tokens; None where it has no flag for them."""
    command = options.command
    if command is None or TOKENS in placeholders(command):
        return None if command is None else list(command)
    return with_tokens(command) if options.flags != "off" else None


def by_own_flags(
    options: SearchOptions,
    facts: Facts,
    look: Callable[[SearchOptions], Facts],
    observe: Callable[[Event], None] = lambda event: None,
) -> tuple[SearchOptions, Facts]:
    """Put placeholders into the command, where its flags state just what the script was seen to train with, and where
    one states what it evaluates with.

    Args:
        options: with the command.
        facts: as the script was seen.
        look: sees it with another command.
        observe: is told that it is run again.

    Returns:
        Options and facts, with the batches searched where they can be; what is to be said of that is in the facts'
        ``warnings``, and in their ``left_out`` why the batch stays as it is.
    """
    if options.command is None:
        return options, facts
    options, facts, why = _by_tokens(options, facts, look, observe)
    assert options.command is not None, "it is a script's"
    found, batch, left_out = list(options.command), None, dict(facts.left_out)
    own = Batch.reference(facts).share(facts.ranks)
    if facts.token_flag is None and (reason := batch_stays(options, own)) is not None:
        left_out = {"batch": reason, **left_out}
    if why is not None and "batch" in left_out:
        left_out["batch"] = why
    if options.flags != "off":
        is_done = "batch" in left_out or facts.token_flag is not None
        batch = None if is_done else with_placeholders(found, own)
        found = with_evaluation(batch or found) or batch or found
    facts = facts.model_copy(update={"left_out": left_out, "evaluation_batch": own_evaluation(found)})
    if found == list(options.command):
        return options, facts
    what = "evaluation batch" if batch is None else "batch"
    said = f"the {what} is searched through flags of the script: {flags_of(found)}. --flags off leaves them alone."
    facts = facts.model_copy(update={"warnings": (*facts.warnings, said)})
    return options.model_copy(update={"command": tuple(found)}), facts


def _by_tokens(
    options: SearchOptions,
    facts: Facts,
    look: Callable[[SearchOptions], Facts],
    observe: Callable[[Event], None],
) -> tuple[SearchOptions, Facts, str | None]:
    """Have the tokens of a script's batches searched, if a flag of its command is seen to state them: options with
    placeholders, and facts with ``token_flag``. Else both as they were, and why."""
    assert options.command is not None, "it is a script's"
    is_said = TOKENS in placeholders(options.command)
    command = _with_tokens(options)
    own = own_batch(command) if command is not None else None
    may_be = is_said or facts.batch_varies or (facts.token_batches is not None and facts.token_batches.extents)
    if command is None or own is None or not may_be:
        return options, facts, None
    found, why = _proven(options, facts, command, own, look, observe)
    if found is None:
        plain = tuple(filled(command, own)) if is_said else options.command
        why = f"{flags_of(command, filled(command, own))}: {why}"
        return options.model_copy(update={"command": plain}), facts, why
    said = f"the batch is searched through flags of the script: {flags_of(command)}. "
    said += why if is_said else f"{why} --flags off leaves them alone."
    found = found.model_copy(update={"warnings": (*found.warnings, said)})
    return options.model_copy(update={"command": tuple(command)}), found, None


def _proven(
    options: SearchOptions,
    facts: Facts,
    command: list[str],
    own: Batch,
    look: Callable[[SearchOptions], Facts],
    observe: Callable[[Event], None],
) -> tuple[Facts | None, str]:
    """The facts with the flag, and what was seen of it; None where it is not what makes the batches, and why."""
    assert own.flag is not None, "the command states it"
    assert own.tokens is not None, "and its number"
    if not facts.allow_split:
        return None, OTHER_TOKENS
    seen_passes = Batch.reference(facts).share(facts.ranks).accumulate
    if BATCH[1] not in placeholders(command):
        return None, "a flag for accumulation is wanted too. Write it so: --NAME {batch.accumulate=1}"
    if own.accumulate != seen_passes:
        return None, f"accumulation is stated as {own.accumulate}, but {seen_passes} passes to a step were seen"
    extents = facts.token_batches.extents if facts.token_batches is not None else ()
    if not extents:
        return None, "the script's batches, as far as they were seen, are not made by tokens"
    seen = facts.by_flag(own.flag, own.tokens)
    if seen is None:
        most = ", ".join(f"{one.most:,.0f}" for one in extents)
        return None, f"it states another number than the script's batches have at most ({most} tokens)"
    if any(one.in_order for one in extents):
        return None, "the script's batches come by length, so that trials of other tokens would train on other lengths"
    others = [one.tokens for one in Batch.choices(seen) if one.tokens not in (own.tokens, None)]
    if not others:
        return None, "as many tokens in more passes would leave no room for a few of the longest samples in each"
    other_tokens = max((one for one in others if one < own.tokens), default=min(others))
    other = tuple(filled(command, own.model_copy(update={"tokens": other_tokens})))
    observe(Warned(f"the script is run again, with {other_tokens:,} tokens in place of {own.tokens:,}."))
    try:
        again = look(options.model_copy(update={"command": other}))
    except (TaskError, NothingFits) as error:
        return None, f"with {other_tokens:,} in its place, which would show that it makes the batches, {error}"
    if again.by_flag(own.flag, other_tokens) is None:
        return None, f"with {other_tokens:,} in its place the script's batches were not seen to have at most that"
    return seen, f"With {other_tokens:,} in place of {own.tokens:,} its batches were seen to have at most that."


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
    if own is None and (TOKENS in placeholders(command) or (options.flags != "off" and with_tokens(command))):
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
