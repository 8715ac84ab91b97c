"""One plain line for each event of a search: for pipes, logs and ``NO_COLOR``-minded people."""

from __future__ import annotations

import math

from ...searches.budget import budget_words
from ...searches.events import (
    INTERRUPTED,
    AblationEnded,
    AblationStarted,
    AnchorEnded,
    AnchorStarted,
    BudgetKnown,
    Event,
    FinalistEnded,
    Inspected,
    PredictionEnded,
    PredictionStarted,
    SearchStarted,
    SecondsKnown,
    Stopped,
    TrialEnded,
    TrialStarted,
    Warned,
)
from ...searches.options import SearchOptions
from ...searches.time_budget import NUM_REPEATS
from ...units import format_duration
from ...words import count, facts_words, outcome_words, over_reference, settings_words
from ..spent import spent_words
from .progress import Progress, anchor_label, finalist_label, trial_label, without_label

_LONG_TRIAL_S = 30.0
"""A trial that has run for so long is said to run still."""
_LONG_READING_S = 30.0
"""A task that takes so long to be read may be a script that trains where it is imported."""


def line(event: Event, progress: Progress) -> str:
    """What an event says, after ``progress`` has taken it in."""
    return f"[{format_duration(progress.elapsed_s)}] {_said(event, progress)}"


def opening(progress: Progress) -> str:
    """What is said before anything has happened."""
    options = progress.options
    whose = f": {options.task}" if options.command is None else ""
    return f"[{format_duration(progress.elapsed_s)}] {_reading(options)}{whose}"


def _reading(options: SearchOptions) -> str:
    """A task file is read; a script is run until it has shown what it trains."""
    return "reading the task" if options.command is None else f"running {options.task} up to its third optimizer step"


def phase_words(progress: Progress) -> str | None:
    """What is done beside trials, and for how long; None where nothing is."""
    seconds = progress.phase_s
    if seconds is None:
        return None
    if progress.predicting is not None:
        configurations = count(progress.predicting, "configuration")
        return f"predicting the memory and work of {configurations}, {format_duration(seconds)}"
    words = f"{_reading(progress.options)}, {format_duration(seconds)}"
    if seconds > _LONG_READING_S and progress.options.command is None:
        words += ": does it train where it is imported? Move that under `if __name__ == '__main__':`"
    return words


def still(progress: Progress) -> str | None:
    """What is still done, where nothing was said for a while; None where it has only begun."""
    words = phase_words(progress)
    if words is not None:
        words = f"still {words}"
    else:
        long = [each for each in progress.running if progress.running_s(each) >= _LONG_TRIAL_S]
        words = ", ".join(f"{each.label} still runs, {format_duration(progress.running_s(each))}" for each in long)
    return f"[{format_duration(progress.elapsed_s)}] {words}" if words else None


def _said(event: Event, progress: Progress) -> str:
    match event:
        case Inspected(facts):
            return f"task: {facts_words(facts)}"
        case BudgetKnown(budget):
            return f"budget: {budget_words(budget)}"
        case SearchStarted(study, num_configurations, num_trials, resumed):
            done = f", {len(resumed)} of them done before" if resumed else ""
            return f"study {study}: up to {num_trials} of {count(num_configurations, 'configuration')} are tried{done}"
        case Warned(message):
            return f"note: {message}"
        case PredictionStarted(num_configurations):
            return (
                f"predicting the memory and work of {count(num_configurations, 'configuration')}, without running them"
            )
        case PredictionEnded(num_predicted, num_configurations):
            return f"predicted: {num_predicted} of {num_configurations}"
        case TrialStarted(number, settings, finalist_round, by_turns):
            return f"{_starts(number, finalist_round, by_turns)}: {settings_words(settings, progress.facts)}"
        case TrialEnded():
            return f"{trial_label(event.number)}: {_trial(event, progress)}{_more(event, progress)}"
        case FinalistEnded():
            said = outcome_words(event.outcome, progress.budget)
            return f"{finalist_label(event.number)}, {round_words(event.round, event.num_rounds)}: {said}"
        case AnchorStarted(number):
            return f"{anchor_label(number)} starts: trials are compared with it"
        case AnchorEnded(number, _, outcome, shift):
            pace = f"; since then speeds are {math.exp(-shift):.2g} of what they were at first" if shift else ""
            return f"{anchor_label(number)}: {outcome_words(outcome, progress.budget)}{pace}"
        case AblationStarted(without, number, settings):
            return f"{without_label(without)}, round {number}, starts: {settings_words(settings, progress.facts)}"
        case AblationEnded(without, number, _, outcome):
            return f"{without_label(without)}, round {number}: {outcome_words(outcome, progress.budget)}"
        case SecondsKnown(spent):
            return spent_words(spent)
        case Stopped(reason):
            return f"no more trials: {reason}" + ("" if reason == INTERRUPTED else "; the best are measured again")


def _starts(number: int, finalist_round: int | None, by_turns: bool) -> str:
    if finalist_round is None:
        return f"{trial_label(number)}{'' if number else ' (the job as it stands)'} starts"
    if by_turns:
        rounds = round_words(finalist_round or 0)
        return f"{finalist_label(number)} and the reference by turns, {rounds}, start in fresh processes"
    fresh = " in a fresh process" if finalist_round else ""
    fresh += ", since those before leave it unsure" if finalist_round > NUM_REPEATS else ""
    return f"{finalist_label(number)}, {round_words(finalist_round)}, starts{fresh}"


def _trial(event: TrialEnded, progress: Progress) -> str:
    said = outcome_words(event.outcome, progress.budget)
    if event.outcome.kind == "measured" and event.number and progress.reference is not None:
        said += over_reference(event.outcome.measurement, progress.reference)
    if not event.is_sure and event.outcome.kind == "measured":
        said += f", unsure: other work took {event.outcome.measurement.disturbed:.0%} of its time"
    return f"{said} (best so far)" if event.is_best and event.number else said


def _more(event: TrialEnded, progress: Progress) -> str:
    """After the reference, how long the search likely goes on, where nobody has said how long it may."""
    left_s, trial_s = progress.left_s, progress.trial_s
    is_first = event.number == 0 and event.outcome.kind == "measured" and progress.options.max_time is None
    if not is_first or left_s is None or trial_s is None:
        return ""
    trials = count(progress.likely_trials, "trial")
    again = "by turns with the reference" if progress.by_turns else "in fresh processes"
    more = f"about {format_duration(left_s)} more: some {trials} of {format_duration(trial_s)}"
    return f"; {more}, then the best again {again}"


def round_words(number: int, whole: int | None = None) -> str:
    """Round 0 chooses among the finalists; those after it are reported."""
    if number == 0:
        return "to choose the best"
    return f"round {number}" + (f" of {whole}" if whole is not None else "")
