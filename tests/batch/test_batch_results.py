"""The results store: what replaces what, and what is never mixed up."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from search_tables import BF16, MIB, REFERENCE, measurement

from autotune.errors import StudyError
from autotune.searches.store.measurements import Kept, Key, Results
from autotune.workers import Measured, OutOfMemory

KEY = Key(task="a" * 64, device='{"type":"cpu"}', threads=2, torch="2.13.0", autotune="0.1")
FAST, SLOW = (Measured(measurement=measurement(speed)) for speed in (20.0, 10.0))


def ran_out(peak_bytes: int) -> OutOfMemory:
    return OutOfMemory(peak_bytes=peak_bytes, message="over")


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(f"sqlite:///{tmp_path}/results.db")


def keep(results: Results, outcome, settings=REFERENCE, key=KEY, series=0, run="trial") -> None:
    results.keep(key, series, Kept(settings, outcome, None, "batch/job"), run)


def test_what_is_kept_is_read_back_by_another_process(results, tmp_path):
    """As one would that opens the file anew."""
    keep(results, FAST)
    again = Results(f"sqlite:///{tmp_path}/results.db")
    assert again.known(KEY, 0) == {REFERENCE.canonical(): Kept(REFERENCE, FAST, None, "batch/job")}


def test_searches_that_begin_at_one_moment_all_open_a_new_store(tmp_path):
    """As a service's do: each finds no table, and makes it."""
    for number in range(3):
        gate = threading.Barrier(6)

        def open_one(path: Path = tmp_path / f"{number}.db", gate: threading.Barrier = gate) -> None:
            gate.wait()
            Results(f"sqlite:///{path}")

        with ThreadPoolExecutor(6) as threads:
            for opened in [threads.submit(open_one) for _ in range(6)]:
                opened.result()


@pytest.mark.parametrize(
    "other",
    [{"task": "b" * 64}, {"device": '{"type":"cuda"}'}, {"threads": 4}, {"torch": "2.14.0"}, {"autotune": "0.2"}],
)
def test_another_key_knows_nothing_of_it(results, other):
    keep(results, FAST)
    assert results.known(replace(KEY, **other), 0) == {}


@pytest.mark.parametrize(
    ("first", "then", "known"),
    [
        (SLOW, FAST, FAST),
        (SLOW, ran_out(9 * MIB), SLOW),
        (ran_out(9 * MIB), SLOW, SLOW),
        (ran_out(9 * MIB), ran_out(8 * MIB), ran_out(9 * MIB)),
        (ran_out(8 * MIB), ran_out(9 * MIB), ran_out(9 * MIB)),
    ],
)
def test_the_newest_measurement_is_kept_and_memory_that_ran_out_says_less(results, first, then, known):
    """Of two that ran out, the one that needed more."""
    keep(results, first)
    keep(results, then)
    assert results.known(KEY, 0)[REFERENCE.canonical()].outcome == known


def test_series_and_runs_are_apart(results):
    """The newest series is the one to read; a finalist's round is not a trial."""
    assert results.series(KEY) == 0
    keep(results, SLOW)
    keep(results, FAST, series=1)
    keep(results, FAST, settings=BF16, run="0")
    assert results.series(KEY) == 1
    assert results.known(KEY, 0)[REFERENCE.canonical()].outcome == SLOW
    assert results.known(KEY, 1)[REFERENCE.canonical()].outcome == FAST
    assert list(results.known(KEY, 0, "0")) == [BF16.canonical()]


def test_what_is_no_database_is_refused(tmp_path):
    """With its name and what to do."""
    path = tmp_path / "results.db"
    path.write_text("not a database, and long enough to be looked at as one" * 10)
    with pytest.raises(StudyError, match=r"results\.db: file is not a database"):
        Results(f"sqlite:///{path}")


@pytest.mark.parametrize("url", ["nonsense://host", "results.db", "mysql+none://user:secret@host/name"])
def test_a_url_that_is_none_is_the_users_error(url):
    """What was wanted, and no password."""
    with pytest.raises(StudyError, match=r"expected sqlite:///path\.db") as error:
        Results(url)
    assert "secret" not in str(error.value)
