"""The table-driven executor: deterministic, and honest about what it does not know."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from search_tables import facts

from autotune.errors import TrialsLost
from autotune.plan import Plan
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.testing.executors import ExecutorContract
from autotune.workers import Crashed, Failed, Lost, OutOfMemory
from autotune.workers.table import Row, TableExecutor

FACTS = facts()
OOM = OutOfMemory(peak_bytes=2**30, message="no more")
ROWS = (
    Row(settings=Settings(), samples_per_s=(100.0, 104.0), peak_bytes=(2**20, 2**21)),
    Row(settings=Settings(batch=Batch(micro=64)), outcome=OOM),
)


class TestTableExecutor(ExecutorContract):
    tasks = Path(__file__).parents[1] / "tasks"

    @pytest.fixture
    def executor(self):
        return TableExecutor(FACTS, ROWS)

    def ask(self, executor, settings):
        return executor.submit(self.request("healthy", plan=Plan(settings=settings))).result()

    def test_repeats_come_in_the_order_of_the_row_and_start_again(self, executor):
        outcomes = [self.ask(executor, Settings()).measurement for _ in range(3)]
        assert [outcome.samples_per_s.value for outcome in outcomes] == [100.0, 104.0, 100.0]
        assert [outcome.peak.process for outcome in outcomes] == [2**20, 2**21, 2**20]

    def test_a_row_may_be_any_outcome(self, executor):
        assert self.ask(executor, Settings(batch=Batch(micro=64))) == OOM

    def test_a_row_that_is_lost_raises_for_whoever_waits_for_it(self):
        executor = TableExecutor(FACTS, [Row(settings=Settings(), outcome=Lost(message="no room in /tmp"))])
        assert self.ask(executor, Settings()) == Lost(message="no room in /tmp")
        with pytest.raises(TrialsLost, match="trials cannot be run: no room in /tmp"):
            executor.ask(self.request("healthy"))

    def test_a_configuration_without_a_row_fails_with_its_name(self, executor):
        outcome = self.ask(executor, Settings(batch=Batch(micro=3)))
        assert isinstance(outcome, Failed)
        assert '"micro": 3' in outcome.message

    def test_a_closed_table_answers_as_a_closed_executor_does(self, executor):
        executor.close()
        assert self.ask(executor, Settings()) == Crashed(message="stopped: the executor was closed")

    def test_a_row_without_an_answer_is_refused(self):
        with pytest.raises(ValidationError, match="as many samples_per_s as peak_bytes"):
            Row(settings=Settings(), samples_per_s=(1.0,))
