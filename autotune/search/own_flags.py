"""The batch of a script whose command has no placeholders: by its own flags, where they are known."""

from __future__ import annotations

from dataclasses import replace

from ..script.flags import flags_of, with_placeholders
from ..techniques import Facts
from ..techniques.batch import Batch
from .options import SearchOptions

__all__ = ["by_own_flags"]


def by_own_flags(options: SearchOptions, facts: Facts) -> tuple[SearchOptions, Facts, str | None]:
    """Put placeholders into the command, where its flags state just what the script was seen to train with.

    Returns:
        Options and facts, with the batch searched where it can be, and what to say of that.
    """
    if options.command is None or options.flags == "off" or facts.batch_varies:
        return options, facts, None
    command = with_placeholders(options.command, Batch.reference(facts).share(facts.ranks))
    if command is None:
        return options, facts, None
    left_out = {name: reason for name, reason in facts.left_out.items() if name != "batch"}
    said = f"the batch is searched by the script's own flags, {flags_of(command)}; --flags off leaves it as it is."
    return replace(options, command=tuple(command)), facts.model_copy(update={"left_out": left_out}), said
