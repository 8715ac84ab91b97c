"""``--dry-run``: what a search would try, and how long it may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..search_spaces import Unavailable, load_space
from ..techniques import Facts, Technique
from ..workers import Executor
from .budget import asked, check_possible
from .configuration_space import ConfigurationSpace
from .duration import Expected, expected, likely_trials
from .inquiry import inspected, reference_settings
from .options import SearchOptions
from .pace import Pace

__all__ = ["Preview", "preview"]


@dataclass(frozen=True)
class Preview:
    """A search that has not begun."""

    facts: Facts
    """What is known of the task."""
    choices: Mapping[str, tuple[Technique, ...]]
    """What may be tried, by technique."""
    unavailable: tuple[Unavailable, ...]
    """What the space names and cannot be had."""
    conflicts: Mapping[str, int]
    """Why combinations of choices are left out, and how many."""
    num_configurations: int
    """Size of the space, the reference included."""
    num_trials: int
    """Configurations that would be measured."""
    num_likely: int
    """Of those, how many the sampler likely takes before it stops by itself."""
    expected: Expected
    """How long it would take, finalists included."""


def preview(options: SearchOptions, executor: Executor) -> Preview:
    """Inspect the task and say what a search would do; measures nothing and writes nothing.

    Raises:
        UserError: the budget is below what any process takes.
        TaskError: the task cannot be loaded or inspected.
        SpaceError: an unknown technique or value in the space.
    """
    pace = Pace(options.trial_time_s, options.max_time_s)
    space = load_space(options.space)
    found = inspected(options, executor, pace)
    facts = found.facts
    check_possible(asked(options), facts)
    choices = space.choices(facts)
    configurations = ConfigurationSpace(choices, reference_settings(facts), facts.num_blocks, precision=facts.precision)
    size = configurations.num_configurations
    num_trials = min(options.trials, size)
    return Preview(
        facts=facts,
        choices=choices,
        unavailable=space.unavailable(facts),
        conflicts=configurations.conflicts,
        num_configurations=size,
        num_trials=num_trials,
        num_likely=likely_trials(num_trials, options.sampler),
        expected=expected(facts, found.seconds, options, num_trials),
    )
