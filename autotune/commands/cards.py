"""``autotune estimate --card h100,l40s``: the largest micro-batch of the job as it stands, on each of several cards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from ..errors import UserError
from ..estimates import EstimateOptions
from ..estimates.cards import Card
from ..estimates.types import Room
from ..report.cards import as_json, explain, line
from ..report.estimate import line as facts_line
from ..report.printing import print_json, print_words, tell
from ..results import CardsEstimation, OnCard, WhatToEstimate
from ..searches.time_budget import TimeBudget
from ..techniques import Facts
from ..workers import Executor
from .calibrate import predict_request
from .estimate import estimated, options_of, read_task
from .where import Where, trials

_WIDTH = 80
"""Columns that the table takes in a pipe."""
_NOTHING_FITS = 3


def estimate_cards(what: WhatToEstimate, json: bool, verbose: bool) -> int:
    """Estimate a task's memory on several cards, and print a row for each.

    Args:
        what: the task, and the cards that are planned for.
        json: print one JSON document.
        verbose: show what the task prints.

    Returns:
        The exit code: 3 where not even a micro-batch of 1 fits on any card.

    Raises:
        UserError: an option that is of one card; or as :func:`.estimate.estimate_task`.
    """
    if what.space != WhatToEstimate.space or what.storage is not None:
        raise UserError(
            "--space and --storage are for one card. Several are compared by the job as it stands: leave them out, or "
            "name one card."
        )
    tell(f"reading the task: {what.task}")
    with trials(Where("local", verbose=verbose), what.task, "cpu") as executor:
        found = estimate_on_each(
            what, executor, lambda event: tell(facts_line(event) if isinstance(event, Facts) else line(event))
        )
    if json:
        print_json(as_json(found))
    else:
        print_words(sys.stdout, explain(found), _WIDTH)
    return 0 if any(row.estimate.largest for row in found.rows) else _NOTHING_FITS


def estimate_on_each(
    what: WhatToEstimate, executor: Executor, observe: Callable[[Facts | OnCard], None]
) -> CardsEstimation:
    """Ask for all cards of one compute capability in a process: what is traced once answers for each.

    Args:
        what: the task, and the cards that are planned for.
        executor: runs the children on a CPU; stays the caller's to close.
        observe: is told the facts, and each card as it is known.

    Raises:
        TaskError: the task cannot be loaded, or its step raises.
    """
    time_budget = TimeBudget(0.0, None)
    facts = read_task(what, executor, time_budget)
    observe(facts)
    rows: dict[Card, OnCard] = {}
    for alike in _by_capability(what.cards):
        first, *others = (_options(card, what, facts) for card in alike)
        rooms = tuple(Room(limit_bytes=one.limit_bytes or 0, context=one.context) for one in others)
        asked = first.model_copy(update={"others": rooms})
        name = "estimate-{}.{}".format(*alike[0].capability)
        answer = estimated(executor.ask(predict_request(name, what, time_budget, asked)), what)
        for card, found in zip(alike, (answer.estimate, *answer.others), strict=True):
            rows[card] = OnCard(card, found)
            observe(rows[card])
    return CardsEstimation(what, facts, tuple(rows[card] for card in what.cards))


def _options(card: Card, what: WhatToEstimate, facts: Facts) -> EstimateOptions:
    limit_bytes = min(card.device.memory_bytes, what.budget_bytes or card.device.memory_bytes)
    return options_of(facts.model_copy(update={"device": card.device}), limit_bytes)


def _by_capability(cards: tuple[Card, ...]) -> Iterator[list[Card]]:
    """In the order in which they were asked for."""
    for capability in dict.fromkeys(card.capability for card in cards):
        yield [card for card in cards if card.capability == capability]
