"""The faults' own looks: each finds what it is there to find, and nothing where all is well."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.faults import stored
from benchmarks.faults.__main__ import KINDS
from benchmarks.faults.checks import clean, refused
from benchmarks.faults.core import Fault, attempt
from benchmarks.faults.ended import Ended
from benchmarks.faults.place import Place, place_of


def ended(code: int = 2, out: str = "", err: str = "plan.yaml: no such file.\n", cpu_s: float = 0.1) -> Ended:
    return Ended(code, out, err, cpu_s)


def test_a_refusal_is_withstood():
    assert refused(ended(), "plan.yaml") == []


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (ended(code=1), "exit 1, not 2"),
        (ended(err=""), "no message"),
        (ended(out="data\n"), "data on stdout"),
        (ended(err="\x1b[2J\n"), "a raw control character"),
        (ended(err="\x9b2J\n"), "a raw control character"),
        (ended(err="a\n" * 101), "101 lines"),
        (ended(err="a" * 20_001), "a line of 20001"),
        (ended(err="Traceback (most recent call last):\n"), "a traceback"),
        (ended(err="This is a bug in autotune\n"), "This is a bug"),
        (ended(cpu_s=9.0), "9 s of CPU time"),
    ],
)
def test_a_refusal_that_is_none_is_found(how: Ended, words: str):
    assert any(words in complaint for complaint in refused(how))


def test_a_users_traceback_is_a_users():
    assert clean(ended(err="Traceback (most recent call last):\n  model.py\n"), (2,), of_user=True) == []


def study(path: Path, *rows: tuple[int, str, str]) -> None:
    """A database as Optuna has it, with trials of a number, a micro-batch and an outcome's kind."""
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE studies (study_id, study_name)")
        database.execute("INSERT INTO studies VALUES (1, 'model-1')")
        database.execute("CREATE TABLE trials (trial_id, study_id)")
        database.execute("CREATE TABLE study_user_attributes (study_id, key, value_json)")
        database.execute("CREATE TABLE trial_user_attributes (trial_id, key, value_json)")
        for trial, (number, micro, kind) in enumerate(rows):
            database.execute("INSERT INTO trials VALUES (?, 1)", (trial,))
            for key, value in (("number", number), ("settings", {"batch": micro}), ("outcome", {"kind": kind})):
                row = (trial, key, json.dumps(value))
                database.execute("INSERT INTO trial_user_attributes VALUES (?, ?, ?)", row)


def test_what_is_lost_changed_or_measured_twice_is_found(tmp_path: Path):
    rows = ((0, "8", "measured"), (1, "4", "measured"))
    for name, found in {"same": rows, "lost": rows[:1], "changed": (rows[0], (1, "4", "crashed"))}.items():
        study(tmp_path / name, *found)
    study(tmp_path / "twice", *rows, (2, "4", "measured"))
    before = stored.read(tmp_path / "same")
    looks = {name: stored.same_or_more(before, stored.read(tmp_path / name)) for name in ("lost", "changed", "twice")}
    assert stored.same_or_more(before, before) == []
    assert [name in " ".join(complaints) for name, complaints in looks.items()] == [True, True, True]
    assert stored.read(tmp_path / "changed").kinds() == ["measured", "crashed"]
    assert stored.measured_again(before, "[3 s] trial 2 starts: batch 8\n") == []
    assert stored.measured_again(before, "[3 s] trial 1 starts: batch 8\n") == ["measured again: trials [1]"]


def test_a_process_and_a_file_that_are_left_are_found_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.faults.place._GRACE_S", 0.0)
    with place_of(tmp_path) as place:
        (place.tmp / "left").touch()
        (place.work / "litter").touch()
        left = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        found = place.left_behind()
    assert [any(word in one for one in found) for word in ("input()", "/tmp: left", "'litter'")] == [True] * 3
    assert not Path(f"/proc/{left.pid}").exists()
    assert not place.root.exists()


def test_a_fault_of_the_harness_is_told_as_one(tmp_path: Path):
    def fails(place: Place) -> list[str]:
        raise ZeroDivisionError("here")

    result = attempt(Fault("fails", "none", "none", "nothing", fails), tmp_path)
    assert (result.status, "the harness" in result.got) == ("failed", True)


def test_what_is_undefended_is_not_tried(tmp_path: Path):
    result = attempt(Fault("told", "none", "none", "nothing", os.abort, undefended="root may"), tmp_path)
    assert (result.status, result.got) == ("undefended", "root may")


@pytest.mark.medium
def test_there_are_four_hundred_by_both_executors_and_each_has_a_name_of_its_own():
    every = [fault for kind in KINDS for fault in kind.faults()]
    names = {(fault.kind, fault.name, fault.executor) for fault in every}
    assert len(names) == len(every) >= 400
    assert {fault.executor for fault in every} == {"none", "local", "ray"}
