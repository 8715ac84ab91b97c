"""What the environment does is no outcome: it is not stored, not told, and asked again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import optuna
import pytest
from search_tables import SMALL, InMemory, configurations, every, facts, row, run_search, small_search

from autotune.errors import TrialsLost
from autotune.searches.events import TrialEnded, Warned
from autotune.workers import Crashed, Failed, Lost, Outcome, TrialRequest
from autotune.workers.table import TableExecutor

LOST = Lost(message="/tmp/autotune-1: the trial's files cannot be kept there: No space left on device.")

pytestmark = pytest.mark.usefixtures("in_memory", "elsewhere")


class Failing(TableExecutor):
    """A table of which some requests, counted from 0, come to something else."""

    def __init__(self, instead: dict[int, Outcome], num_slots: int = 1) -> None:
        super().__init__(facts(), [row(settings) for settings in configurations(facts())], num_slots)
        self.instead = instead

    def _answer(self, request: TrialRequest) -> Outcome:
        number = sum(asked.kind != "predict" for asked in self.requests)
        answer = super()._answer(request)
        return answer if request.kind == "predict" else self.instead.get(number, answer)


@pytest.fixture
def stored(in_memory: Mapping[str, InMemory]) -> Callable[[], list[str | None]]:
    """The kinds of outcomes that a study has of its trials."""

    def kinds() -> list[str | None]:
        (storage,) = in_memory.values()
        trials = optuna.load_study(study_name="model-1", storage=storage).trials
        return [trial.user_attrs.get("outcome", {}).get("kind") for trial in trials if "settings" in trial.user_attrs]

    return kinds


def names(executor: TableExecutor) -> list[str]:
    return [request.id for request in executor.requests if request.kind != "predict"]


@pytest.mark.parametrize("number", range(11))
def test_a_trial_that_is_lost_at_any_moment_ends_the_search_and_is_asked_again_on_resume(number: int, stored):
    """Inspection, reference, trials, the round that chooses, and fresh interpreters; the plan is that of a search
    that lost nothing."""
    Path("space.yaml").write_text(SMALL)
    with pytest.raises(TrialsLost, match=r"No space left on device.*\n.*--resume") as error:
        run_search(every(), executor=Failing({number: LOST}))
    assert error.value.exit_code == 2
    before = [kind for kind in stored() if kind] if number else []
    assert before == ["measured"] * min(max(number - 1, 0), 4)
    resumed = run_search(every(resume=True))
    assert len(before) + len(resumed.measured) == 4
    assert resumed.plan.search.trials == 4
    assert resumed.plan.settings == small_search(every).plan.settings


@pytest.mark.parametrize("number", [0, 1])
def test_a_job_that_is_killed_from_outside_is_not_at_fault(number: int, stored):
    """By the kernel for lack of memory, or by somebody's hand: while it is inspected, and as the reference."""
    Path("space.yaml").write_text(SMALL)
    killed = Crashed(message="Killed (SIGKILL) while training\n  File model.py")
    with pytest.raises(TrialsLost, match=r"Killed \(SIGKILL\) while training: something .* from outside.*\n.*--resume"):
        run_search(every(), executor=Failing({number: killed}))
    assert not number or set(stored()) == {None}
    assert run_search(every(resume=True)).plan.settings == small_search(every).plan.settings


def test_what_runs_beside_a_lost_trial_is_stored_before_the_search_ends(stored):
    Path("space.yaml").write_text(SMALL)
    with pytest.raises(TrialsLost):
        run_search(every(), executor=Failing({2: LOST}, num_slots=3))
    assert sorted(map(str, stored())) == ["None", "measured", "measured", "measured"]


def alike(number: int) -> Crashed:
    return Crashed(message=f"exited with code {number} and without an answer while loading the task\nstack {number}")


def test_three_failures_alike_in_a_row_halt_a_search_where_nothing_runs_any_more():
    """Unlike configurations; the reference, which had run, fails alike. All three are asked again on resume."""
    executor = Failing({2: alike(1), 3: alike(2), 4: alike(3), 5: alike(4)})
    with pytest.raises(TrialsLost, match=r"3 in a row ended alike.*\n(.*\n)*.*--resume"):
        run_search(every(), executor=executor)
    assert names(executor) == ["inspect", "trial-000", "trial-001", "trial-002", "trial-003", "doubt"]
    crashed = {request.plan.settings.canonical() for request in executor.requests[-4:-1] if request.kind == "measure"}
    resumed = run_search(every(resume=True, trials=4))
    assert {settings.canonical() for settings in resumed.measured} == crashed
    assert {event.outcome.kind for event in resumed.seen(TrialEnded)} == {"measured"}


def test_three_failures_alike_are_the_configurations_own_where_the_reference_still_runs(stored):
    """It is asked once for each kind of failure; what failed stays so."""
    executor = Failing({number: alike(number) for number in (2, 3, 4, 6)})
    run = run_search(every(), executor=executor)
    assert names(executor).count("doubt") == 1
    assert "3 trials in a row ended alike. Does anything still run? Trial 0 is run once more." in [
        event.message for event in run.seen(Warned)
    ]
    assert stored()[1:4] == ["crashed"] * 3


@pytest.mark.parametrize("third", [alike(9).model_copy(update={"message": "other"}), Failed(message="other")])
def test_failures_that_differ_or_are_not_in_a_row_are_believed(third: Outcome):
    executor = Failing({2: alike(1), 3: alike(2), 4: third, 6: alike(3)})
    run_search(every(), executor=executor)
    assert "doubt" not in names(executor)


def test_a_forgotten_trial_is_believed_by_nobody():
    """The resumed search counts only what was measured, and proposes what was forgotten."""
    executor = Failing({number: alike(number) for number in (2, 3, 4, 5)})
    with pytest.raises(TrialsLost):
        run_search(every(), executor=executor)
    resumed = run_search(every(resume=True))
    assert resumed.plan.search.trials == len({s.canonical() for s in resumed.measured}) + 1
