"""A driver that is killed at any moment goes on with nothing lost but the trial in flight."""

from __future__ import annotations

import itertools
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from search_tables import (
    MIB,
    configurations,
    every,
    facts,
    options,
    row,
    run_search,
    search_until,
    small_search,
    speed,
)

from autotune.errors import StudyError, TaskError
from autotune.plan import Peak, Plan
from autotune.search_spaces import load_space
from autotune.searches.events import SearchStarted, TrialEnded, Warned
from autotune.searches.requests import reference_settings
from autotune.searches.sampler.configuration_space import ConfigurationSpace
from autotune.searches.store.exclusive import ExclusiveStorage
from autotune.searches.store.lock import Lock
from autotune.techniques import Device, Settings
from autotune.workers import MeasureRequest, Outcome, TimedOut, TrialRequest
from autotune.workers.table import TableExecutor

URL = "sqlite:///.autotune/model.db"


pytestmark = pytest.mark.usefixtures("small_space")


def countdown(number: int) -> Callable[[object], bool]:
    """True from the ``number``-th call on."""
    calls = itertools.count(1)
    return lambda about: next(calls) >= number


def outcomes_stored() -> set[str]:
    trials = optuna.load_study(study_name="model-1", storage=URL).trials
    return {
        Settings.model_validate(trial.user_attrs["settings"]).canonical()
        for trial in trials
        if "outcome" in trial.user_attrs
    }


def evidence_stored() -> int:
    attrs = optuna.load_study(study_name="model-1", storage=URL).user_attrs
    return sum(key.startswith("again:") for key in attrs)


def comparable(plan: Plan) -> dict[str, object]:
    return plan.model_dump(exclude={"search": {"seconds"}})


@pytest.mark.medium
@pytest.mark.parametrize("number", [*range(10, 60, 5), *range(60, 100, 10)])
def test_nothing_stored_is_measured_again_wherever_the_driver_is_killed(number: int):
    """A search of four configurations makes some 70 commits, 4 trials and 4 fresh runs. The parameters that Optuna is
    told of stand for the settings that were measured. Half a round, whose reference was to follow, is measured again: a
    pair is of one time."""
    search_until(countdown(number), every())
    before, fresh_before = outcomes_stored(), evidence_stored()
    resumed = run_search(every(resume=True))
    assert before.isdisjoint(settings.canonical() for settings in resumed.measured)
    assert len(before) + len(resumed.measured) == 4
    is_half = fresh_before in (3, 5)
    assert fresh_before + len(resumed.again) == 2 + 2 * 2 + is_half
    trials = optuna.load_study(study_name="model-1", storage=URL).trials
    assert {trial.state.name for trial in trials} <= {"COMPLETE", "FAIL"}
    assert resumed.plan.search.trials == 4
    assert resumed.plan.settings == small_search(every).plan.settings
    space = ConfigurationSpace(load_space("space.yaml").choices(facts()), reference_settings(facts()))
    told = [trial for trial in trials if "settings" in trial.user_attrs]
    assert len(told) >= 4
    for trial in told:
        assert space.settings(trial.params) == Settings.model_validate(trial.user_attrs["settings"])


@pytest.mark.parametrize("number", [20, 35])
def test_a_search_that_stops_by_itself_stops_where_it_would_have_stopped(number: int):
    search_until(countdown(number), options())
    before = len(outcomes_stored())
    resumed = run_search(options(resume=True))
    whole = small_search()
    assert before + len(resumed.measured) == len(whole.measured) < 4
    assert resumed.plan.search.stopped == whole.plan.search.stopped
    assert resumed.plan.settings == whole.plan.settings


def test_a_trial_in_flight_is_asked_again_under_its_number():
    search_until(lambda about: isinstance(about, MeasureRequest) and about.id == "trial-002", options())
    study = optuna.load_study(study_name="model-1", storage=URL)
    lost = [trial for trial in study.trials if trial.state.name == "RUNNING" and "settings" in trial.user_attrs]
    resumed = run_search(options(resume=True))
    first = next(request for request in resumed.executor.requests if request.kind == "measure")
    assert first.id == "trial-002"
    assert first.plan.settings == Settings.model_validate(lost[0].user_attrs["settings"])


def test_a_search_that_had_ended_is_resumed_without_measuring_anything():
    whole = run_search(options())
    resumed = run_search(options(resume=True))
    assert resumed.measured == resumed.again == []
    assert comparable(resumed.plan) == comparable(whole.plan)


def test_more_trials_go_on_from_those_there_are():
    run_search(options(trials=2))
    resumed = run_search(options(resume=True, trials=3))
    assert len(resumed.measured) == 1


@pytest.mark.medium
def test_without_resume_another_study_is_begun():
    run_search(options(trials=1))
    assert run_search(options(trials=1)).plan.search.study == "model-2"


def test_resume_goes_on_with_the_newest():
    run_search(options(trials=1))
    run_search(options(trials=1))
    assert run_search(options(trials=2, resume=True)).plan.search.study == "model-2"


def test_two_tasks_of_one_storage_keep_to_their_own_studies():
    run_search(options(trials=1, task="a.py", storage="sqlite:///both.db"))
    run_search(options(trials=1, task="b.py", storage="sqlite:///both.db"))
    names = optuna.get_all_study_names("sqlite:///both.db")
    assert names == ["a-1", "b-1"]


@pytest.mark.medium
def test_resume_without_a_study_begins_one_and_says_so():
    """A driver killed while it read the task left none."""
    ran = run_search(every(resume=True))
    assert ran.plan.search.trials == 4
    assert any("no study of this task" in event.message for event in ran.seen(Warned))


@pytest.mark.medium
def test_a_reference_that_was_cut_short_is_measured_again():
    """A search under too short a --max-time ended on it; with more time it goes on."""
    cut_short = row(reference_settings(facts()), outcome=TimedOut(deadline_s=9.0, message="ended while timing"))
    with pytest.raises(TaskError, match="--max-time"):
        run_search(every(max_time=900.0), rows=[cut_short])
    resumed = run_search(every(resume=True))
    assert [event.number for event in resumed.seen(TrialEnded)] == [0, 1, 2, 3]
    assert run_search(every(resume=True)).measured == []


def test_a_resumed_search_shows_what_was_measured_before():
    run_search(options(trials=3))
    resumed = run_search(options(resume=True))
    (started,) = resumed.seen(SearchStarted)
    assert [event.number for event in started.resumed] == [0, 1, 2]
    assert sum(event.is_best for event in started.resumed) == 1


@pytest.mark.medium
def test_two_tasks_of_one_name_resume_each_their_own():
    """Two files called model.py in one storage: a resume goes on with the newest study of its own model."""
    other = facts(fingerprint="sha256:" + "b" * 64)
    run_search(options(trials=1))
    run_search(options(trials=1), known=other)
    assert run_search(options(trials=2, resume=True)).plan.search.study == "model-1"
    assert run_search(options(trials=2, resume=True), known=other).plan.search.study == "model-2"


def test_a_study_of_another_task_is_not_resumed():
    run_search(options(trials=1))
    with pytest.raises(StudyError, match="model-1 belongs to another task") as caught:
        run_search(options(resume=True), known=facts(fingerprint="sha256:" + "b" * 64))
    assert caught.value.exit_code == 2


@pytest.mark.medium
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"budget": 900 * MIB}, "--budget was none, but is 900 MiB"),
        ({"margin": 0.1}, "--margin was 0.03, but is 0.1"),
        ({"seed": 1}, "--seed was 0, but is 1"),
        ({"allow_split": True}, "--allow-split was False, but is True"),
        ({"effective_batch": 32}, "--effective-batch was None, but is 32"),
        ({"space": "exact"}, "--space was"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_the_measurements_rest_on_may_not_change(changes: dict[str, object], words: str):
    run_search(options(trials=1))
    with pytest.raises(StudyError, match=words):
        run_search(options(resume=True, **changes))


def test_another_device_is_not_mixed_in():
    run_search(options(trials=1))
    other = facts(device=Device(type="cpu", name="Another", memory_bytes=2**35, bf16=True))
    with pytest.raises(StudyError, match="the device was A CPU, but is Another"):
        run_search(options(resume=True), known=other)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"micro_batch": 8}, "micro_batch_size was None, but is 8"),
        ({"precision": "bf16"}, "precision was None, but is bf16"),
        ({"max_grad_norm": 1.0}, "max_grad_norm was None, but is 1.0"),
    ],
)
def test_a_job_that_is_stated_otherwise_is_another_job(changes: dict[str, object], words: str):
    run_search(options(trials=2))
    with pytest.raises(StudyError, match=words):
        run_search(options(trials=3, resume=True), known=facts(**changes))


def test_choices_follow_the_facts_that_the_study_began_with():
    run_search(every(trials=1))
    resumed = run_search(every(resume=True), known=facts(allocators=()))
    assert len(resumed.measured) == 3


def test_a_corrupt_study_is_named_and_left_as_it_is():
    Path(".autotune").mkdir()
    Path(".autotune/model.db").write_bytes(b"not a database" * 100)
    with pytest.raises(StudyError, match=r"\.autotune/model.db: .*not a database.*Move the file aside"):
        run_search(options())
    assert Path(".autotune/model.db").read_bytes() == b"not a database" * 100


def test_a_damaged_study_is_named_and_left_as_it_is():
    run_search(options(trials=2))
    with sqlite3.connect(".autotune/model.db") as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    path = Path(".autotune/model.db")
    content = bytearray(path.read_bytes())
    content[5000:20000] = b"\xaa" * 15000
    path.write_bytes(content)
    with pytest.raises(StudyError, match=r"model.db: .*(corrupt|malformed)"):
        run_search(options(resume=True))
    assert path.read_bytes() == content


def test_somebody_elses_database_is_left_as_it_is():
    with sqlite3.connect("mine.db") as database:
        database.execute("CREATE TABLE recipes (name TEXT)")
    database.close()
    before = Path("mine.db").read_bytes()
    with pytest.raises(StudyError, match="it holds recipes"):
        run_search(options(storage="sqlite:///mine.db"))
    assert Path("mine.db").read_bytes() == before


def test_a_study_in_use_names_the_process_that_uses_it():
    Path(".autotune").mkdir()
    lock = Lock(Path(".autotune/model.db"))
    with pytest.raises(StudyError, match=rf"another search is using this study \(process {os.getpid()}\)"):
        run_search(options())
    lock.close()
    run_search(options(trials=1))


@pytest.mark.parametrize("name", [".", "model.py"])
def test_a_storage_that_is_refused_leaves_no_file(name: str):
    Path("model.py").write_text("no database")
    before = sorted(Path().iterdir())
    with pytest.raises(StudyError):
        ExclusiveStorage(f"sqlite:///{name}")
    assert sorted(Path().iterdir()) == before


@pytest.mark.medium
def test_a_study_file_that_another_program_locks_is_named():
    run_search(options(trials=1))
    database = sqlite3.connect(".autotune/model.db", isolation_level=None)
    database.execute("PRAGMA locking_mode = EXCLUSIVE")
    database.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StudyError, match=r"model.db: .*database is locked.*close it"):
        run_search(options(resume=True))
    database.close()


def test_a_search_that_fails_lets_the_next_one_in():
    run_search(options(trials=1))
    with pytest.raises(StudyError, match="--seed"):
        run_search(options(resume=True, seed=1))
    run_search(options(trials=1))


@pytest.mark.parametrize("url", ["nonsense", "oracle7://x/y", "postgresql://nobody@127.0.0.1:1/none"])
def test_a_storage_that_cannot_be_opened_is_a_user_error(url: str):
    with pytest.raises(StudyError, match=r"--storage|127\.0\.0\.1"):
        run_search(options(storage=url))


def test_a_storage_folder_that_cannot_be_made_is_a_user_error():
    Path(".autotune").write_text("")
    with pytest.raises(StudyError, match="cannot be made"):
        run_search(options())


@pytest.mark.medium
def test_what_fell_is_known_after_a_resume_and_nothing_is_measured_again():
    """The fastest needs all of the budget in its second fresh interpreter."""
    limit = 10 * 2**30
    fastest = max(configurations(facts(), load_space("space.yaml")), key=speed)
    rows = [row(fastest, samples_per_s=(speed(fastest),) * 4, peak_bytes=(MIB, MIB, MIB, limit))]
    whole = run_search(every(budget=limit), rows=rows)
    resumed = run_search(every(budget=limit, resume=True), rows=rows)
    assert resumed.measured == resumed.again == []
    assert comparable(resumed.plan) == comparable(whole.plan)
    assert whole.plan.settings != fastest
    assert any("fell when it was measured again" in note for note in resumed.plan.notes)


@pytest.mark.medium
@pytest.mark.parametrize("number", range(65, 125, 10))
def test_a_fall_is_learned_of_whatever_moment_the_driver_is_killed_at(number: int):
    """The fastest, which ended the search, needs all of the budget in its second fresh interpreter; one other fits."""
    limit, known = 700 * MIB, [row(settings) for settings in configurations(facts(), load_space("space.yaml"))]
    fastest = max((one.settings for one in known), key=speed)

    class Falls(TableExecutor):
        def _answer(self, request: TrialRequest) -> Outcome:
            outcome = super()._answer(request)
            if request.id.endswith("round-2") and request.plan.settings == fastest:
                grown = outcome.measurement.model_copy(update={"peak": Peak(process=limit)})
                return outcome.model_copy(update={"measurement": grown})
            return outcome

    search_until(countdown(number), options(budget=limit), Falls)
    resumed = run_search(options(budget=limit, resume=True), executor=Falls(facts(), known))
    assert resumed.plan.settings not in (fastest, reference_settings(facts()))


@pytest.mark.usefixtures("in_memory")
def test_a_study_goes_on_though_a_preset_has_a_row_more_that_leaves_this_job_as_it_is():
    run_search(options(), facts())
    text = Path("space.yaml").read_text()
    Path("space.yaml").write_text(text + "quantization: auto  # of inference\nreversible: auto\n")
    assert run_search(options(resume=True), facts()).measured == []
    Path("space.yaml").write_text(text + "checkpointing: auto\n")
    with pytest.raises(StudyError, match="--space was"):
        run_search(options(resume=True), facts())
