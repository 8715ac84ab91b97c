"""Tells whether trials that fail alike fail for their configurations, or because nothing runs any more.

A task's data may be unmounted in mid-search, or a library upgraded: then every trial fails, and it looks as if the
configurations were at fault. What they have in common does not tell, since most trials share some technique. So a
configuration that ran before is run again. If it still runs, the failures are the configurations' own. If it does not,
they say nothing.
"""

from __future__ import annotations

import re

from ..errors import TrialsLost
from ..workers import Crashed, Failed, Measured, Outcome
from .requests import failure
from .session import Session
from .time_budget import LEAST_SHARE_S

_IN_A_ROW = 3


class Doubt:
    """Looks at each outcome before it is stored."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._alike: list[tuple[str, int | None]] = []
        """The last failures with one message: it, and Optuna's number of the trial."""
        self._proven: set[str] = set()
        """Messages of failures that were shown to be the configurations' own."""

    def take(self, outcome: Outcome, trial: int | None = None) -> None:
        """Take in a trial's or a finalist's outcome.

        Raises:
            TrialsLost: it is the third failure in a row with one message, and what ran before does not run now. The
                study has been told to forget those before it, which are asked again on ``--resume``.
        """
        if not isinstance(outcome, Crashed | Failed) or self._session.was_cut_off(outcome):
            self._alike = []
            return
        message = _without_numbers(outcome.message)
        self._alike = [row for row in self._alike if row[0] == message] + [(message, trial)]
        if len(self._alike) < _IN_A_ROW or message in self._proven:
            return
        again = self._run_again()
        if again is None or self._session.was_cut_off(again):
            return
        if isinstance(again, Measured):
            self._proven.add(message)
            return
        self._session.study.forget(number for _, number in self._alike[:-1] if number is not None)
        raise TrialsLost(
            f"trials cannot be run any more: {_IN_A_ROW} in a row ended alike, and what had run before does not now: "
            f"{failure(again)}\nMend what has changed since the search began."
        )

    def _run_again(self) -> Outcome | None:
        """Run the first configuration that was measured once more; None where none was, or the user stopped."""
        session = self._session
        ran = next((row for row in session.study.tried if isinstance(row.outcome, Measured)), None)
        if ran is None or session.stop.is_set():
            return None
        session.warn(
            f"{_IN_A_ROW} trials in a row ended alike. Does anything still run? Trial {ran.number} is run once more."
        )
        return session.executor.ask(session.request("doubt", ran.settings, LEAST_SHARE_S))


def _without_numbers(message: str) -> str:
    """A message's first line without numbers: process ids and addresses differ from trial to trial."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", message.partition("\n")[0])
