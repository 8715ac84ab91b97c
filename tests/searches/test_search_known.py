"""What other searches have measured, and this one begins with."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from search_tables import MIB, configurations, facts, measurement, options, row

from autotune.searches.driver import search
from autotune.searches.events import TrialEnded
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.precision import Precision
from autotune.workers import Measured
from autotune.workers.table import TableExecutor


class Told:
    """Two splits of one batch, both over the budget."""

    rows = tuple(
        (
            Settings(batch=Batch.of(64, micro), precision=Precision(kind="bf16")),
            Measured(measurement=measurement(speed, process=900 * MIB)),
        )
        for micro, speed in ((16, 100.0), (32, 200.0))
    )

    shares_rounds = False

    def reference(self, session: Any) -> None:
        """Not known."""

    def others(self, session: Any) -> Any:
        return self.rows

    def again(self, session: Any, settings: Settings, finalist_round: int) -> None:
        """Not known."""


@pytest.mark.usefixtures("in_memory")
def test_what_surely_does_not_fit_tells_of_speed_all_the_same(tmp_path, monkeypatch):
    """The larger micro-batch needs more memory than the smaller, which is over the budget already: no trial would be
    made of it, but its speed was measured."""
    monkeypatch.chdir(tmp_path)
    asked, events = options(budget=600 * MIB, trials=3), []
    executor = TableExecutor(facts(), [row(one) for one in configurations(facts())], predict=lambda one: None)
    search(asked, executor, events.append, threading.Event(), known=Told())
    known = [one.settings for one in events if isinstance(one, TrialEnded) and one.is_known]
    assert known == [settings for settings, _ in Told.rows]
