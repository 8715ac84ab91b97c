"""Damaged studies: every field of every stored row, and every table."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from .checks import clean
from .core import Complaints, Fault
from .databases import DATABASE, EITHER, KIND, REFUSED, REFUSES, resume
from .place import Place

_Change = Callable[[Any], object]


def faults() -> Iterator[Fault]:
    """Fields of trials and of the study, tables."""
    for (key, name), (change, codes) in _FIELDS.items():
        expected = REFUSED if codes == REFUSES else "exit 2, or it goes on; its rows are as they were"
        do = partial(_with_trial, key=key, change=change, codes=codes)
        yield Fault(f"a trial's {key}: {name}", KIND, "local", expected, do)
    for key in _ATTRIBUTES:
        for name, text in {"missing": None, "broken": "{", "a number": "7"}.items():
            if (key, name) not in _HARMLESS:
                do = partial(_with_study, key=key, text=text)
                yield Fault(f"the study's {key}: {name}", KIND, "local", REFUSED, do)
    for name, (statement, codes) in _STATEMENTS.items():
        do = partial(_with_statement, statement=statement, codes=codes)
        yield Fault(f"the database: {name}", KIND, "local", REFUSED, do)


# Fields


def _set(*path: str, to: Any) -> _Change:
    def change(row: Any) -> object:
        place = row
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to
        return row

    return change


def _without(*path: str) -> _Change:
    def change(row: Any) -> object:
        place = row
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]
        return row

    return change


class _Text(str):
    """Goes into the database as it is."""


def _to(value: object) -> _Change:
    return lambda row: value


_FIELDS: dict[tuple[str, str], tuple[_Change, Collection[int]]] = {
    ("outcome", "unknown field"): (_set("warp", to=11), REFUSES),
    ("outcome", "unknown field of its measurement"): (_set("measurement", "warp", to=11), REFUSES),
    ("outcome", "unknown field of its peak"): (_set("measurement", "peak", "warp", to=11), REFUSES),
    ("outcome", "unknown kind"): (_set("kind", to="warped"), REFUSES),
    ("outcome", "kind missing"): (_without("kind"), REFUSES),
    ("outcome", "measurement missing"): (_without("measurement"), REFUSES),
    ("outcome", "speed missing"): (_without("measurement", "samples_per_s"), REFUSES),
    ("outcome", "speed negative"): (_set("measurement", "samples_per_s", "value", to=-1.0), REFUSES),
    ("outcome", "speed a word"): (_set("measurement", "samples_per_s", "value", to="fast"), REFUSES),
    ("outcome", "peak negative"): (_set("measurement", "peak", "process", to=-1), REFUSES),
    ("outcome", "peak of 400 digits"): (_set("measurement", "peak", "process", to=10**400), REFUSES),
    ("outcome", "losses a word"): (_set("measurement", "parity", "losses", to="none"), REFUSES),
    ("outcome", "broken JSON"): (_to(_Text('{"kind": "meas')), REFUSES),
    ("outcome", "empty"): (_to(_Text("")), REFUSES),
    ("outcome", "null"): (_to(None), EITHER),
    ("outcome", "a list"): (_to([]), EITHER),
    ("outcome", "a number"): (_to(7), REFUSES),
    ("outcome", "missing"): (_to(...), EITHER),
    ("settings", "unknown technique"): (_set("warp_drive", to={"kind": "on"}), REFUSES),
    ("settings", "unknown field"): (_set("batch", "warp", to=11), REFUSES),
    ("settings", "batch negative"): (_set("batch", "micro", to=-1), REFUSES),
    ("settings", "batch a word"): (_set("batch", "micro", to="many"), REFUSES),
    ("settings", "broken JSON"): (_to(_Text("{")), REFUSES),
    ("settings", "null"): (_to(None), EITHER),
    ("settings", "a list"): (_to([1]), REFUSES),
    ("settings", "missing"): (_to(...), EITHER),
    ("number", "missing"): (_to(...), EITHER),
    ("number", "a word"): (_to("one"), REFUSES),
    ("number", "null"): (_to(None), EITHER),
    ("number", "negative"): (_to(-5), EITHER),
    ("number", "another trial's"): (_to(0), EITHER),
    ("number", "of 400 digits"): (_to(10**400), EITHER),
    ("number", "a share"): (_to(1.5), EITHER),
    ("number", "broken JSON"): (_to(_Text("[")), REFUSES),
    ("observation", "missing"): (_to(...), EITHER),
    ("observation", "null"): (_to(None), EITHER),
    ("observation", "a list"): (_to([]), EITHER),
    ("observation", "broken JSON"): (_to(_Text("{")), REFUSES),
    ("observation", "unknown outcome"): (_set("outcome", to="warped"), EITHER),
}
_ATTRIBUTES = ("task", "fingerprint", "budget", "seed", "allow_split", "space", "facts")
_HARMLESS = {("seed", "a number")}
_STATEMENTS: dict[str, tuple[str, Collection[int]]] = {
    "a trial's table is gone": ("DROP TABLE trial_user_attributes", REFUSES),
    "the studies' table is gone": ("DROP TABLE studies", REFUSES),
    "the values' table is gone": ("DROP TABLE trial_values", EITHER),  # Optuna makes it anew; nothing is read there
    "a column is gone": ("ALTER TABLE trials DROP COLUMN datetime_start", REFUSES),
    "a newer schema": ("UPDATE version_info SET schema_version = 99", EITHER),  # Optuna goes by its migration
    "a newer migration": ("UPDATE alembic_version SET version_num = 'v99.0.0.a'", REFUSES),
    "no schema": ("DELETE FROM version_info", EITHER),
    "an unknown state": ("UPDATE trials SET state = 'WARPED'", REFUSES),
    "two directions": ("INSERT INTO study_directions VALUES (99, 'MINIMIZE', 1, 1)", EITHER),
    "facts of another version": ("UPDATE study_user_attributes SET value_json = '{}' WHERE key = 'facts'", REFUSES),
}


def _with_trial(place: Place, key: str, change: _Change, codes: Collection[int]) -> Complaints:
    """Damage one field of the last trial, and resume."""
    place.take_template()
    with _open(place) as database:
        where = "trial_id = (SELECT max(trial_id) FROM trials) AND key = ?"
        rows = database.execute(f"SELECT value_json FROM trial_user_attributes WHERE {where}", (key,)).fetchall()
        changed = change(json.loads(rows[0][0]))
        if changed is ...:
            database.execute(f"DELETE FROM trial_user_attributes WHERE {where}", (key,))
        else:
            text = str(changed) if isinstance(changed, _Text) else json.dumps(changed)
            database.execute(f"UPDATE trial_user_attributes SET value_json = ? WHERE {where}", (text, key))
    return _resumed(place, codes)


def _with_study(place: Place, key: str, text: str | None) -> Complaints:
    place.take_template()
    with _open(place) as database:
        if text is None:
            database.execute("DELETE FROM study_user_attributes WHERE key = ?", (key,))
        else:
            database.execute("UPDATE study_user_attributes SET value_json = ? WHERE key = ?", (text, key))
    return _resumed(place, REFUSES if text is not None or key != "fingerprint" else EITHER)


def _with_statement(place: Place, statement: str, codes: Collection[int]) -> Complaints:
    place.take_template()
    with _open(place) as database:
        database.execute(statement)
    return _resumed(place, codes)


@contextlib.contextmanager
def _open(place: Place) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(place.work / DATABASE)) as database, database:
        yield database


def _resumed(place: Place, codes: Collection[int]) -> Complaints:
    """Resume until it refuses or starts something; what was there must be there."""
    path = place.work / DATABASE
    before = _rows(path)
    ended = resume(place)
    found = clean(ended, codes)
    lost = [row for row in before if row not in _rows(path)]
    if lost and ended.code == 2:
        found.append(f"rows were changed: {str(lost[0])[:100]}")
    if ended.code == 2 and "model" not in ended.err:
        found.append(f"the study is not named: {ended.last}")
    return found


def _rows(path: Path) -> list[tuple[Any, ...]]:
    """Every attribute of every trial and study; a file that is no database has none."""
    with contextlib.suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        found = db.execute("SELECT study_id, key, value_json FROM study_user_attributes").fetchall()
        return [*found, *db.execute("SELECT trial_id, key, value_json FROM trial_user_attributes").fetchall()]
    return []
