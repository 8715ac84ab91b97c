"""``autotune search``: a search, watched, and what it comes to."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..batch.turns_of_server import server_connection, taking_turns
from ..errors import Interrupted, NothingFits, StudyError, UserError
from ..report.displays.lines import EventFile
from ..report.displays.live import watching
from ..report.printing import console, listened_to, print_json, print_words, tell
from ..report.show import as_json, summary
from ..report.tables import spent_table
from ..script.changes import Changes
from ..script.distributed_launch import other_than_asked
from ..searches.event_base import Event
from ..searches.events import SecondsKnown, TaskRead, Warned
from ..searches.options import SearchOptions
from ..searches.seconds import Spent
from ..searches.store.url import sqlite_files
from ..searches.time_budget import TimeBudget
from ..task_file import refuse_script
from .interrupts import interrupts
from .where import Where, trials

if TYPE_CHECKING:
    from ..plan import Plan
    from ..searches.store.measurements import Results
    from ..workers import Executor


def search(options: SearchOptions, where: Where, json: bool) -> int:
    """Run a search and print the plan's path, or one JSON document.

    Returns:
        The exit code: 0, 3 where ``--require-proof`` finds none, or 130 after a Ctrl-C.
    """
    check_asked(options)  # before anything is said of reading the task
    stop, here = threading.Event(), Path.cwd()
    connection = server_connection()
    where = replace(where, in_turns=connection is not None)
    changes = Changes(here, *_own_files(options)) if options.command is not None else None
    time_budget = TimeBudget(options.trial_time, options.max_time)  # the executor's start is in the time that was given
    spent: list[Spent] = []
    try:
        with (
            watching(options, console(sys.stderr)) as display,
            trials(where.for_search(options), options.task, options.device) as executor,
            interrupts(stop, executor.close, display.interrupted),
            taking_turns(connection, executor, options.device, stop, time_budget) as (in_turn, note_event),
        ):

            def show(event: Event) -> None:
                if isinstance(event, SecondsKnown):
                    spent.append(event.spent)
                    return
                note_event(event)
                display.observe(event)
                if isinstance(event, TaskRead) and options.command and (note := other_than_asked(options.command)):
                    display.observe(Warned(note))
                if changes is not None and isinstance(event, TaskRead) and (said := changes.told()):
                    display.observe(Warned(said))

            plan = search_on(options, in_turn, _observers(options, show), stop, time_budget)
    except KeyboardInterrupt:
        tell("Stopped without a plan. Every trial that ended is kept: --resume goes on from there.")
        return Interrupted.exit_code
    finally:
        if where.verbose and spent:
            print_words(sys.stderr, spent_table(spent[-1]))
        if changes is not None and (said := changes.told()):
            tell(said)
    unproven = plan.gain.unproven if plan.gain is not None and options.require_proof else None
    code = Interrupted.exit_code if stop.is_set() else NothingFits.exit_code if unproven is not None else 0
    with suppress(OSError):  # the plan is written, whoever listens
        print_words(sys.stderr, summary(plan, options.output))
    if unproven is not None:
        tell(f"--require-proof: nothing is proven, so that this ends with {code}: {unproven}. The plan is written.")
    if json:
        stopped = plan.search.stopped if plan.search else None
        print_json({"exit_code": code, "path": str(options.output), "stopped": stopped, "plan": as_json(plan)})
    else:
        with listened_to(sys.stdout):
            print(options.output)
    return code


def check_asked(options: SearchOptions) -> None:
    """Refuse a script in a task's place, and options that do not go together, before anything starts.

    Raises:
        UserError: so it is.
    """
    if (reason := options.not_with_inference(options.command is not None)) is not None:
        raise UserError(reason)
    if options.command is not None:
        return
    refuse_script(options.task)
    if (reason := options.of_scripts_alone()) is not None:
        raise UserError(reason)


def search_on(
    options: SearchOptions,
    executor: Executor,
    observe: Callable[[Event], None],
    stop: threading.Event,
    time_budget: TimeBudget | None = None,
) -> Plan:
    """Search as :func:`autotune.searches.driver.search`, beginning with what earlier searches in this folder have
    measured of the job, and keep what this one measures for later ones."""
    from ..searches.driver import search as run_search  # it takes a moment, and something is shown by now
    from ..searches.reuse import Reuse

    known = Reuse(lambda: kept_measurements(options), options)
    is_kept = True

    def keep(event: Event) -> None:
        nonlocal is_kept
        try:
            if is_kept:
                known.observe(event)
        except StudyError as error:
            is_kept = False
            known.close()
            observe(Warned(f"what is measured is not kept for later searches: {error}"))
        observe(event)

    return run_search(options, executor, keep, stop, time_budget, known)


def kept_measurements(options: SearchOptions) -> Results:
    """Where a search keeps what it measures: ``--measurements``.

    Raises:
        StudyError: it cannot be opened.
    """
    from ..searches.store.measurements import Results
    from ..searches.store.storage import default_storage

    try:
        return Results(options.measurements or default_storage("results"))
    except StudyError as error:  # whose words are those of a study
        raise StudyError(str(error).replace("--storage", "--measurements")) from None


def _own_files(options: SearchOptions) -> list[Path]:
    """What a search writes outside of ``.autotune``, beside its output."""
    asked = [path for path in (options.output, options.progress) if path is not None]
    return [*asked, *sqlite_files(options.storage or "").values(), *sqlite_files(options.measurements or "").values()]


def _observers(options: SearchOptions, display: Callable[[Event], None]) -> Callable[[Event], None]:
    if options.progress is None:
        return display
    file = EventFile(options.progress, options)

    def observe(event: Event) -> None:
        file.observe(event)
        display(event)

    return observe
