"""``autotune search --dry-run``: what a search would try, and how long it may take."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ..report.displays.live import saying
from ..report.preview import as_json, explain
from ..report.printing import console, print_json, print_words
from ..results import Preview
from ..search_spaces import load_space
from ..searches.budget import asked, check_possible
from ..searches.event_base import Event
from ..searches.options import SearchOptions
from ..searches.own_flags import by_own_flags, may_be_in_tokens, told_early
from ..searches.predicted.duration import expected, likely_trials
from ..searches.requests import inspect, inspected, reference_settings
from ..searches.time_budget import TimeBudget
from ..techniques import Facts
from ..workers import Executor
from .where import Where, trials


def preview(options: SearchOptions, where: Where, json: bool) -> int:
    """Print what a search would try, and return 0."""
    with (
        saying(options, console(sys.stderr)) as display,
        trials(where.for_search(options), options.task, options.device) as executor,
    ):
        found = preview_search(options, executor, observe=display.observe)
    if json:
        print_json(as_json(found))
    else:
        print_words(sys.stdout, explain(found, options))
    return 0


def preview_search(
    options: SearchOptions,
    executor: Executor,
    known: Callable[[Facts], int] = lambda facts: 0,
    observe: Callable[[Event], None] = lambda event: None,
) -> Preview:
    """Inspect the task and say what a search would do; measures nothing and writes nothing.

    Args:
        options: of the search.
        executor: runs the inspection; stays the caller's to close.
        known: how many configurations have been measured already.
        observe: is told what can be said before the task is read.

    Raises:
        UserError: the budget is below what any process takes.
        TaskError: the task cannot be loaded or inspected.
        SpaceError: an unknown technique or value in the space.
    """
    time_budget = TimeBudget(options.trial_time, options.max_time)
    space = load_space(options.preset)
    for note in told_early(options, space):
        observe(note)
    from ..searches.sampler.configuration_space import (
        ConfigurationSpace,  # it takes a moment, and something is shown by now
    )

    found = inspected(options, executor, time_budget, space=space, in_tokens=may_be_in_tokens(options))
    options, facts = by_own_flags(
        options, found.facts, lambda other: inspect(other, executor, time_budget, in_tokens=True), observe
    )
    check_possible(asked(options), facts)
    choices = space.choices(facts)
    configurations = ConfigurationSpace(choices, reference_settings(facts), facts.num_blocks, precision=facts.precision)
    size = configurations.num_configurations
    left_out = {name: reason for name, reason in facts.left_out.items() if getattr(space, name, None) is not None}
    num_trials = min(options.trials, size)
    num_known = min(known(facts), num_trials)
    num_likely = likely_trials(num_trials, options.sampler, num_known)
    return Preview(
        facts=facts,
        choices=choices,
        unavailable=space.unavailable(facts),
        conflicts=configurations.conflicts,
        num_configurations=size,
        num_trials=num_trials,
        num_likely=num_likely,
        expected=expected(facts, found.seconds, options, num_likely + 1 if num_known else num_trials),
        left_out=left_out,
    )
