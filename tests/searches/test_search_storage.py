"""Whatever becomes of a study's file, what was measured is kept, and nobody reads a password."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import sqlalchemy.exc
from search_tables import configurations, every, facts, options, row, run_search, search_until

from autotune.errors import PlanError, StudyError
from autotune.plan import Plan
from autotune.searches.events import TrialEnded, Warned
from autotune.searches.options import SearchOptions
from autotune.searches.store.lock import Lock
from autotune.searches.store.storage import open_storage, storage_errors
from autotune.searches.store.url import masked
from autotune.workers import MeasureRequest, Outcome, TrialRequest
from autotune.workers.process import fork
from autotune.workers.table import TableExecutor

SMALL = "schema: autotune/space@1\nprecision: auto\nallocator: auto\n"
"""Four configurations."""
STUDY = Path(".autotune/model.db")


pytestmark = pytest.mark.usefixtures("small_space")


def during(trial: str, happens: Callable[[], object]) -> TableExecutor:
    """An executor that lets something happen while it runs ``trial``."""

    class Eventful(TableExecutor):
        def _answer(self, request: TrialRequest) -> Outcome:
            if request.id == trial:
                happens()
            return super()._answer(request)

    return Eventful(facts(), [row(settings) for settings in configurations(facts())])


def in_place_of_the_study() -> None:
    """Another database takes its name."""
    with sqlite3.connect("other.db") as database:
        database.execute("CREATE TABLE recipes (name TEXT)")
    database.close()
    os.replace("other.db", STUDY)
    assert Path(f"{STUDY}-wal").exists(), "SQLite would take it for the other's"


# What becomes of the file


@pytest.mark.medium
@pytest.mark.parametrize(
    ("remove", "trial"),
    [
        (lambda: shutil.rmtree(".autotune"), "trial-002"),
        (lambda: shutil.rmtree(".autotune"), "finalist-000-round-2"),
        (lambda: os.unlink(STUDY), "trial-002"),
        (lambda: os.rename(".autotune", "moved"), "trial-002"),
    ],
)
def test_a_study_that_is_removed_in_a_search_ends_it_and_is_kept_beside(remove: Callable[[], object], trial: str):
    """The studies of other tasks in its file, too. Put back in its place, it goes on."""
    STUDY.parent.mkdir()
    run_search(every(task="other.py", storage=f"sqlite:///{STUDY}"))
    with pytest.raises(StudyError, match=r"removed or replaced.*kept in (\S+): put it back") as caught:
        run_search(every(), executor=during(trial, remove))
    assert not STUDY.exists()
    (kept,) = STUDY.parent.glob("model-kept-*.db")
    assert str(kept) in str(caught.value)
    os.replace(kept, STUDY)
    resumed = run_search(every(resume=True))
    assert [event.number for event in resumed.seen(TrialEnded)] == ([2, 3] if trial == "trial-002" else [])
    assert run_search(every(task="other.py", storage=f"sqlite:///{STUDY}", resume=True)).measured == []


@pytest.mark.medium
def test_a_file_that_takes_the_studys_place_is_left_as_it_is():
    with pytest.raises(StudyError, match=r"removed or replaced.*kept in (\S+): put it back"):
        run_search(every(), executor=during("trial-002", in_place_of_the_study))
    assert not list(STUDY.parent.glob("model.db-*"))
    with sqlite3.connect(STUDY) as database:
        assert database.execute("SELECT name FROM sqlite_master").fetchall() == [("recipes",)]
    database.close()


def test_a_study_of_which_no_copy_can_be_written_is_said_to_be_lost():
    def block() -> None:
        shutil.rmtree(".autotune")
        Path(".autotune").write_text("")

    with pytest.raises(StudyError, match=r"removed or replaced.*is lost, since no copy can be written: .*exists"):
        run_search(every(), executor=during("trial-002", block))


@pytest.mark.medium
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"\xaa" * path.stat().st_size)])
@pytest.mark.parametrize("trial", ["trial-000", "trial-003", "finalist-000-round-2"])
def test_what_ended_is_in_the_studys_own_file(trial: str, damage: Callable[[Path], object]):
    """After a SIGKILL, with the write-ahead log missing or garbled."""
    search_until(lambda about: isinstance(about, MeasureRequest) and about.id == trial, every())
    damage(Path(f"{STUDY}-wal"))
    Path(f"{STUDY}-shm").unlink()
    resumed = run_search(every(resume=True))
    assert not [event for event in resumed.seen(Warned) if "no study" in event.message]
    assert len(resumed.measured) == {"trial-000": 4, "trial-003": 1}.get(trial, 0)


@pytest.mark.medium
def test_an_empty_study_file_is_told_of_where_a_study_was_to_be_resumed():
    """As it is when all that was stored was in a write-ahead log that is gone."""
    Path(".autotune").mkdir()
    open_storage(f"sqlite:///{STUDY}")
    resumed = run_search(every(resume=True))
    (said,) = [event.message for event in resumed.seen(Warned) if "no study of this task" in event.message]
    assert f"{STUDY} is there, but holds no study at all" in said


# One driver


@pytest.mark.medium
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_another_name_of_the_file_is_the_same_study(link: Callable[[str, str], None]):
    """A second search by it would measure at once on one device; by a hard link SQLite would damage the file."""

    def second() -> None:
        link(str(STUDY.resolve()), "link.db")
        with pytest.raises(StudyError, match=r"another search is using this study|2 names \(hard links\)"):
            run_search(every(storage="sqlite:///link.db"))
        os.unlink("link.db")

    ran = run_search(every(), executor=during("trial-001", second))
    assert len(ran.measured) == 4


@pytest.mark.medium
def test_a_lock_whose_file_was_removed_is_taken_again():
    def second() -> None:
        with pytest.raises(StudyError, match="another search is using this study"):
            Lock(STUDY)

    executor = during("trial-001", lambda: os.unlink(f"{STUDY}.lock"))
    answer = executor._answer
    executor._answer = lambda request: (second() if request.id == "trial-002" else None, answer(request))[1]
    assert len(run_search(every(), executor=executor).measured) == 4


def test_what_was_forked_from_a_search_does_not_hold_its_study():
    STUDY.parent.mkdir()
    lock, pid = Lock(STUDY), fork()
    if pid == 0:
        signal.pause()
    try:
        lock.close()
        Lock(STUDY).close()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# What was stored


def stored() -> list[tuple[object, ...]]:
    """Every row of the study."""
    with sqlite3.connect(STUDY) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = [(table, *row) for table in sorted(tables) for row in database.execute(f"SELECT * FROM {table}")]
    database.close()
    return rows


def change(table: str, key: str, new: Callable[[str], str | None]) -> None:
    """One attribute's JSON; None removes it."""
    with sqlite3.connect(STUDY) as database:
        found = database.execute(f"SELECT rowid, value_json FROM {table} WHERE key LIKE ?", (key,)).fetchall()
        rowid, value = found[-1]
        text = new(value)
        if text is None:
            database.execute(f"DELETE FROM {table} WHERE rowid = ?", (rowid,))
        else:
            database.execute(f"UPDATE {table} SET value_json = ? WHERE rowid = ?", (text, rowid))
    database.close()


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[..., SearchOptions]], Path]:
    """The study's folder of a whole search, made once for those that change a copy of it."""

    @cache
    def search(ask: Callable[..., SearchOptions]) -> Path:
        folder = tmp_path_factory.mktemp("searched")
        with contextlib.chdir(folder):
            Path("space.yaml").write_text(SMALL)
            run_search(ask())
        return folder / STUDY.parent

    return search


def with_field(text: str) -> str:
    return json.dumps({**json.loads(text), "of_another_version": 1})


@pytest.mark.medium
@pytest.mark.parametrize(
    ("table", "key", "new"),
    [
        ("trial_user_attributes", "outcome", with_field),
        ("trial_user_attributes", "outcome", lambda text: text[:-9]),
        ("trial_user_attributes", "outcome", lambda text: json.dumps({"kind": "teleported"})),
        ("trial_user_attributes", "settings", with_field),
        ("trial_user_attributes", "settings", lambda text: None),
        ("trial_user_attributes", "number", lambda text: None),
        ("trial_user_attributes", "number", lambda text: '"three"'),
        ("trial_user_attributes", "number", lambda text: "0"),
        ("trial_user_attributes", "observation", with_field),
        ("study_user_attributes", "again:%", with_field),
        ("study_user_attributes", "predicted:%", with_field),
        ("study_user_attributes", "again:%", lambda text: "{"),
        ("study_user_attributes", "facts", with_field),
        ("study_user_attributes", "budget", lambda text: "[]"),
        ("study_user_attributes", "fingerprint", lambda text: None),
    ],
)
def test_a_row_of_another_version_ends_a_resume_and_is_left_as_it_is(
    table: str, key: str, new: Callable[[str], str | None], searched: Callable[..., Path]
):
    ask = options if key.startswith("predicted") else every
    shutil.copytree(searched(ask), STUDY.parent)
    change(table, key, new)
    before = stored()
    with pytest.raises(
        StudyError, match=r"not of this version.*(Leave out --resume|Choose another).*nothing was changed"
    ) as caught:
        run_search(ask(resume=True))
    assert caught.value.exit_code == 2
    assert stored() == before


# Storages that are none, and passwords


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        "sqlite:///x.db?mode=memory",
        "sqlite:///file:x.db?uri=true",
        "sqlite:///~/x.db",
        "sqlite:///folder",
        "sqlite:///space.yaml/x.db",
        "sqlite:///no/such/x.db",
        f"sqlite:///{'x' * 5000}",
        "sqlite:////dev/zero",
    ],
)
def test_what_keeps_no_study_is_refused_and_nothing_is_left(url: str):
    Path("folder").mkdir()
    before = sorted(os.listdir())
    with pytest.raises(StudyError, match=r"--storage|Write sqlite"):
        run_search(every(storage=url))
    assert sorted(os.listdir()) == before


SECRETS = [
    "postgresql://user:hunter2@127.0.0.1:1/none",
    "postgresql://user:hunter2@127.0.0.1:port/none",
    "postgresql://user:hunt@er2@127.0.0.1:1/none",
    "postgresql://user@127.0.0.1:1/none?password=hunter2",
    "postgres//user:hunter2@host/none",
    "mysql://user:hunter2@127.0.0.1:1/none",
    "mysql+pymysql://user:hunter%32@127.0.0.1:1/none",
    "oracle7://user:hunter2@x/y",
    "user:hunter2@host",
    "sqlite://user:hunter2@host/x.db",
    "sqlite+nothing:///x.db?password=hunter2",
]


@pytest.mark.parametrize("url", SECRETS)
def test_a_password_is_not_printed(url: str):
    with pytest.raises(StudyError) as caught:
        run_search(every(storage=url))
    assert [word for word in ("hunter2", "hunt@er2", "hunter%32", "er2@") if word in str(caught.value)] == []
    assert "***" in masked(url)


@pytest.mark.parametrize("url", SECRETS)
def test_a_drivers_own_words_lose_the_password(url: str):
    """Some drivers repeat what they were given."""
    password = "hunt@er2" if "hunt@er2" in url else "hunter2"
    with pytest.raises(StudyError) as caught, storage_errors(url):
        raise sqlalchemy.exc.OperationalError("", {}, Exception(f"cannot connect by {url}: {password} is wrong"))
    assert [word for word in (password, "hunter%32", "er2@") if word in str(caught.value)] == []


@pytest.mark.parametrize("url", ["sqlite:///x.db", "postgresql://user@host:5432/name", "mysql://host/name"])
def test_a_url_without_a_password_is_printed_as_it_is(url: str):
    assert masked(url) == url


@pytest.mark.parametrize(
    ("url", "words"),
    [("postgresql+pg8000://u:p@h/n", "pg8000"), ("mysql://u:p@h/n", "MySQLdb"), ("mysql+pymysql://h/n", "pymysql")],
)
def test_the_driver_that_is_missing_is_the_one_that_is_named(url: str, words: str):
    with pytest.raises(StudyError, match=words) as error:
        run_search(every(storage=url))
    assert ("psycopg" in str(error.value)) == url.startswith("postgresql")  # no other database is asked by it


@pytest.mark.medium
def test_a_plan_that_cannot_be_written_in_the_end_is_told_and_written_by_a_resume():
    """Its folder, which was there when the search began, is a file now."""

    def block() -> None:
        Path("out").rmdir()
        Path("out").write_text("")

    with pytest.raises(PlanError, match="cannot be written") as caught:
        run_search(every(output=Path("out/plan.yaml")), executor=during("trial-002", block))
    said, _, plan = str(caught.value).partition(" It is:\n")
    assert "--resume and another -o" in said
    resumed = run_search(every(resume=True))
    assert resumed.measured == resumed.again == []
    assert Plan.from_yaml(plan).settings == resumed.plan.settings
