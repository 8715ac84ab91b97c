"""The batches of a script whose command has no placeholders: by its own flags, where they are known."""

from __future__ import annotations

from dataclasses import replace

from ..script.command import own_evaluation
from ..script.flags import flags_of, with_evaluation, with_placeholders
from ..techniques import Facts
from ..techniques.batch import Batch
from .options import SearchOptions

__all__ = ["by_own_flags"]


def by_own_flags(options: SearchOptions, facts: Facts) -> tuple[SearchOptions, Facts, str | None]:
    """Put placeholders into the command, where its flags state just what the script was seen to train with, and where
    one states what it evaluates with.

    Returns:
        Options and facts, with the batches searched where they can be, and what to say of that.
    """
    if options.command is None:
        return options, facts, None
    found, left_out = list(options.command), facts.left_out
    if options.flags != "off":
        batch = None if facts.batch_varies else with_placeholders(found, Batch.reference(facts).share(facts.ranks))
        if batch is not None:
            found, left_out = batch, {name: reason for name, reason in left_out.items() if name != "batch"}
        found = with_evaluation(found) or found
    facts = facts.model_copy(update={"left_out": left_out, "evaluation_batch": own_evaluation(found)})
    if found == list(options.command):
        return options, facts, None
    said = f"the batch is searched by the script's own flags, {flags_of(found)}; --flags off leaves it as it is."
    return replace(options, command=tuple(found)), facts, said
