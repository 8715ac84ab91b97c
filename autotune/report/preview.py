"""What ``--dry-run`` prints: the space, its size, and an estimate of the time."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..results import Preview
from ..searches.budget import asked, limits_words
from ..searches.options import SearchOptions
from ..searches.own_flags import batch_stays
from ..techniques import Technique
from ..words import count, facts_words, roughly
from .tables import rows_table


def as_json(found: Preview) -> dict[str, Any]:
    """Plain data."""
    return {
        "configurations": found.num_configurations,
        "trials": found.num_trials,
        "likely_trials": found.num_likely,
        "estimate_s": {"low": found.expected.low_s, "high": found.expected.high_s, "most": found.expected.most_s},
        "choices": {
            name: [choice.model_dump(mode="json", exclude_defaults=True) for choice in choices]
            for name, choices in found.choices.items()
        },
        "unavailable": [
            {"technique": row.technique, "setting": row.setting.model_dump(mode="json"), "reason": row.reason}
            for row in found.unavailable
        ],
        "conflicts": dict(found.conflicts),
        "left_out": dict(found.left_out),
        "facts": found.facts.model_dump(mode="json"),
    }


def explain(found: Preview, options: SearchOptions) -> RenderableType:
    """The same for people."""
    within = "" if (budget := limits_words(asked(options))) == "none" else f" within {budget}"
    size = count(found.num_configurations, "configuration")
    early = batch_stays(options)  # said before the task was read
    missing = [(name, reason) for name, reason in found.left_out.items() if reason != early]
    missing += [(row.technique, f"{row.setting.describe()}: {row.reason}") for row in found.unavailable]
    missing += [(count(number, "combination"), reason) for reason, number in found.conflicts.items()]
    parts: list[RenderableType] = [
        Text(f"{options.task}{within}: {size}", style="bold"),
        Text("\nTask", style="bold"),
        rows_table([("", facts_words(found.facts))]),
        Text("\nSpace", style="bold"),
        rows_table([(name, _choices(choices, found)) for name, choices in found.choices.items()]),
    ]
    if missing:
        parts += [Text("\nNot to be had here", style="bold"), rows_table(missing)]
    if found.facts.warnings:
        parts += [Text("\nNotes", style="bold"), rows_table([("-", message) for message in found.facts.warnings])]
    parts += [Text("\nSearch", style="bold"), rows_table([("", _time(found))])]
    return Group(*parts)


def _time(found: Preview) -> str:
    """``likely 1.5 min to 3 min: about 11 of at most 24 trials, then the best again …; at most 20 min``."""
    low, high, most = map(roughly, (found.expected.low_s, found.expected.high_s, found.expected.most_s))
    trials = count(found.num_trials, "trial")
    if found.num_likely < found.num_trials:
        trials = f"about {found.num_likely} of at most {trials}"
    likely = f"likely {low}" if low == high else f"likely {low} to {high}"
    return f"{likely}: {trials}, then the best again in fresh processes" + ("" if most == high else f"; at most {most}")


def _choices(choices: tuple[Technique, ...], found: Preview) -> str:
    words = (
        choice.describe(found.facts) if choice.model_dump(exclude_defaults=True) else "as it is" for choice in choices
    )
    return " | ".join(words)
