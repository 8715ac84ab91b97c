"""What trials print is heard before anyone has their outcomes."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from autotune.errors import UserError
from autotune.workers import Crashed, Executor, InspectRequest, Outcome, TrialRequest
from autotune.workers.overheard import Overheard
from autotune.workers.pool import done

REQUEST = InspectRequest(id="trial-001", task="model.py", device="cpu")


class Answers(Executor):
    """Gives one outcome, or raises, to whatever is asked."""

    num_slots = 3

    def __init__(self, answer: Outcome | Exception) -> None:
        self.answer, self.is_closed = answer, False

    def submit(self, request: TrialRequest) -> Future[Outcome]:
        if not isinstance(self.answer, Exception):
            return done(self.answer)
        failed: Future[Outcome] = Future()
        failed.set_exception(self.answer)
        return failed

    def close(self) -> None:
        self.is_closed = True


def test_output_is_heard_under_the_requests_name_and_the_outcome_is_as_it_was():
    said: list[tuple[str, str]] = []
    outcome = Crashed(message="no", output="a\nb\n")
    with Overheard(Answers(outcome), lambda *heard: said.append(heard)) as executor:
        assert executor.ask(REQUEST) == outcome
        assert said == [("trial-001", "a\nb\n")]
        assert executor.num_slots == 3


def test_silence_is_not_heard():
    said: list[tuple[str, str]] = []
    Overheard(Answers(Crashed(message="no")), lambda *heard: said.append(heard)).ask(REQUEST)
    assert said == []


def test_what_the_executor_itself_raises_is_raised():
    with pytest.raises(UserError, match="the cluster has died"):
        Overheard(Answers(UserError("the cluster has died")), lambda *heard: None).ask(REQUEST)


def test_closing_it_closes_what_runs_the_trials():
    within = Answers(Crashed(message="no"))
    with Overheard(within, lambda *heard: None):
        pass
    assert within.is_closed
