"""Damaged studies: every field of every stored row, files that are cut, garbled, gone, elsewhere or in use."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import sqlite3
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from . import stored
from .checks import clean
from .core import Complaints, Fault
from .ended import LONG_S, Ended
from .place import Place
from .scene import SEARCH, Held, begin, set_up

__all__ = ["faults"]

_KIND = "studies"
_REFUSED = "exit 2 that names the study; its rows are as they were"
_DATABASE = Path(".autotune/model.db")
_GOES_ON = (0, 130)
_REFUSES = (2,)
_EITHER = (0, 2, 130)

_Change = Callable[[Any], object]


def faults() -> Iterator[Fault]:
    """Fields of trials and of the study, tables, files, two searches at once."""
    for (key, name), (change, codes) in _FIELDS.items():
        expected = _REFUSED if codes == _REFUSES else "exit 2, or it goes on; its rows are as they were"
        do = partial(_with_trial, key=key, change=change, codes=codes)
        yield Fault(f"a trial's {key}: {name}", _KIND, "local", expected, do)
    for key in _ATTRIBUTES:
        for name, text in {"missing": None, "broken": "{", "a number": "7"}.items():
            if (key, name) not in _HARMLESS:
                do = partial(_with_study, key=key, text=text)
                yield Fault(f"the study's {key}: {name}", _KIND, "local", _REFUSED, do)
    for name, statement in _STATEMENTS.items():
        do = partial(_with_statement, statement=statement)
        yield Fault(f"the database: {name}", _KIND, "local", _REFUSED, do)
    for name, (harm, codes) in _FILES.items():
        yield Fault(f"the file: {name}", _KIND, "local", _REFUSED, partial(_with_file, harm=harm, codes=codes))
    for name in ("missing", "garbled", "cut"):
        expected = "what was stored is found, or exit 2: never no study"
        yield Fault(f"after a SIGKILL, the log ahead: {name}", _KIND, "local", expected, partial(_log, harm=name))
    for name, link in _LINKS.items():
        for executor in ("local", "ray") if name == "through a symlink" else ("local",):
            expected = "exit 2: another search is using this study"
            do = partial(_second, link=link, executor=executor)
            yield Fault(f"a second search, {name}", _KIND, executor, expected, do)
    reason = "root may write every file: a mode says nothing here" if os.geteuid() == 0 else ""
    do = partial(_with_file, harm=lambda path: path.chmod(0o444), codes=_REFUSES)
    yield Fault("the file: read-only by its mode", _KIND, "local", _REFUSED, do, undefended=reason)


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
    ("outcome", "unknown field"): (_set("warp", to=11), _REFUSES),
    ("outcome", "unknown field of its measurement"): (_set("measurement", "warp", to=11), _REFUSES),
    ("outcome", "unknown field of its peak"): (_set("measurement", "peak", "warp", to=11), _REFUSES),
    ("outcome", "unknown kind"): (_set("kind", to="warped"), _REFUSES),
    ("outcome", "kind missing"): (_without("kind"), _REFUSES),
    ("outcome", "measurement missing"): (_without("measurement"), _REFUSES),
    ("outcome", "speed missing"): (_without("measurement", "samples_per_s"), _REFUSES),
    ("outcome", "speed negative"): (_set("measurement", "samples_per_s", "value", to=-1.0), _REFUSES),
    ("outcome", "speed a word"): (_set("measurement", "samples_per_s", "value", to="fast"), _REFUSES),
    ("outcome", "peak negative"): (_set("measurement", "peak", "process", to=-1), _REFUSES),
    ("outcome", "peak of 400 digits"): (_set("measurement", "peak", "process", to=10**400), _REFUSES),
    ("outcome", "losses a word"): (_set("measurement", "parity", "losses", to="none"), _REFUSES),
    ("outcome", "broken JSON"): (_to(_Text('{"kind": "meas')), _REFUSES),
    ("outcome", "empty"): (_to(_Text("")), _REFUSES),
    ("outcome", "null"): (_to(None), _EITHER),
    ("outcome", "a list"): (_to([]), _EITHER),
    ("outcome", "a number"): (_to(7), _REFUSES),
    ("outcome", "missing"): (_to(...), _EITHER),
    ("settings", "unknown technique"): (_set("warp_drive", to={"kind": "on"}), _REFUSES),
    ("settings", "unknown field"): (_set("batch", "warp", to=11), _REFUSES),
    ("settings", "batch negative"): (_set("batch", "micro", to=-1), _REFUSES),
    ("settings", "batch a word"): (_set("batch", "micro", to="many"), _REFUSES),
    ("settings", "broken JSON"): (_to(_Text("{")), _REFUSES),
    ("settings", "null"): (_to(None), _EITHER),
    ("settings", "a list"): (_to([1]), _REFUSES),
    ("settings", "missing"): (_to(...), _EITHER),
    ("number", "missing"): (_to(...), _EITHER),
    ("number", "a word"): (_to("one"), _REFUSES),
    ("number", "null"): (_to(None), _EITHER),
    ("number", "negative"): (_to(-5), _EITHER),
    ("number", "another trial's"): (_to(0), _EITHER),
    ("number", "of 400 digits"): (_to(10**400), _EITHER),
    ("number", "a share"): (_to(1.5), _EITHER),
    ("number", "broken JSON"): (_to(_Text("[")), _REFUSES),
    ("observation", "missing"): (_to(...), _EITHER),
    ("observation", "null"): (_to(None), _EITHER),
    ("observation", "a list"): (_to([]), _EITHER),
    ("observation", "broken JSON"): (_to(_Text("{")), _REFUSES),
    ("observation", "unknown outcome"): (_set("outcome", to="warped"), _EITHER),
}
_ATTRIBUTES = ("task", "fingerprint", "budget", "seed", "allow_split", "space", "facts")
_HARMLESS = {("seed", "a number")}
_STATEMENTS = {
    "a trial's table is gone": "DROP TABLE trial_user_attributes",
    "the studies' table is gone": "DROP TABLE studies",
    "the values' table is gone": "DROP TABLE trial_values",
    "a column is gone": "ALTER TABLE trials DROP COLUMN datetime_start",
    "a newer schema": "UPDATE version_info SET schema_version = 99",
    "a newer migration": "UPDATE alembic_version SET version_num = 'v99.0.0.a'",
    "no schema": "DELETE FROM version_info",
    "an unknown state": "UPDATE trials SET state = 'WARPED'",
    "two directions": "INSERT INTO study_directions (direction, study_id, objective) VALUES ('MINIMIZE', 1, 1)",
    "facts of another version": "UPDATE study_user_attributes SET value_json = '{\"a\": 1}' WHERE key = 'facts'",
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
    return _resumed(place, _REFUSES if text is not None or key != "fingerprint" else _EITHER)


def _with_statement(place: Place, statement: str) -> Complaints:
    place.take_template()
    with _open(place) as database:
        database.execute(statement)
    return _resumed(place, _REFUSES)


@contextlib.contextmanager
def _open(place: Place) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(place.work / _DATABASE)) as database, database:
        yield database


def _resumed(place: Place, codes: Collection[int]) -> Complaints:
    """Resume until it refuses or starts something; what was there must be there."""
    path = place.work / _DATABASE
    before = _rows(path)
    ended = _resume(place)
    found = clean(ended, codes)
    lost = [row for row in before if row not in _rows(path)]
    if lost and ended.code == 2:
        found.append(f"rows were changed: {str(lost[0])[:100]}")
    if ended.code == 2 and "model" not in ended.err:
        found.append(f"the study is not named: {ended.last}")
    return found


def _resume(place: Place) -> Ended:
    running = begin(place, "local")
    if running.comes(r" starts", LONG_S):
        running.send(signal.SIGINT)
    return running.finish()


def _rows(path: Path) -> list[tuple[Any, ...]]:
    """Every attribute of every trial and study; a file that is no database has none."""
    with contextlib.suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        found = db.execute("SELECT study_id, key, value_json FROM study_user_attributes").fetchall()
        return [*found, *db.execute("SELECT trial_id, key, value_json FROM trial_user_attributes").fetchall()]
    return []


# Files


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _garble(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[8192:40000] = b"\xaa" * (40000 - 8192)
    path.write_bytes(content)


def _replace(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _become_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _become_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _foreign(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE recipes (name TEXT)")


def _dangle(path: Path) -> None:
    path.unlink()
    path.symlink_to("/no/such/folder/model.db")


_FILES: dict[str, tuple[Callable[[Path], object], Collection[int]]] = {
    "cut": (_cut, _REFUSES),
    "garbled": (_garble, _REFUSES),
    "text": (partial(_replace, content=b"no database at all " * 100), _REFUSES),
    "one byte": (partial(_replace, content=b"\0"), _REFUSES),
    "empty": (partial(_replace, content=b""), _EITHER),
    "a folder": (_become_folder, _REFUSES),
    "a pipe": (_become_pipe, _REFUSES),
    "somebody else's database": (_foreign, _REFUSES),
    "a link to nowhere": (_dangle, _REFUSES),
    "gone": (lambda path: path.unlink(), _GOES_ON),
    "its lock is a folder": (lambda path: Path(f"{path}.lock").mkdir(), _REFUSES),
    "its lock is held": (lambda path: _hold(Path(f"{path}.lock")), _REFUSES),
    "locked by another program": (lambda path: _lock(path), _REFUSES),
}
_kept: list[object] = []
"""What is held until the lane's next fault."""


def _hold(path: Path) -> None:
    file = path.open("a+")
    fcntl.flock(file, fcntl.LOCK_EX)
    _kept[:] = [file]


def _lock(path: Path) -> None:
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("BEGIN EXCLUSIVE")
    _kept[:] = [database]


def _with_file(place: Place, harm: Callable[[Path], object], codes: Collection[int]) -> Complaints:
    place.take_template()
    path = place.work / _DATABASE
    harm(path)
    before = path.read_bytes() if path.is_file() else None
    ended = _resume(place)
    _kept.clear()
    found = clean(ended, codes)
    if ended.code == 2 and before is not None and path.read_bytes() != before:
        found.append("the file was changed")
    return found


def _log(place: Place, harm: str) -> Complaints:
    """A driver is killed, and SQLite's write-ahead log does not survive it."""
    set_up(place, "reference")
    running = begin(place, "local")
    Held(place, running, "trial")
    running.send(signal.SIGKILL)
    running.finish(10)
    path = place.work / _DATABASE
    before, log = stored.read(path), Path(f"{path}-wal")
    if log.exists():
        content = log.read_bytes()
        log.unlink() if harm == "missing" else log.write_bytes(
            content[: len(content) // 2] if harm == "cut" else bytes(reversed(content))
        )
    (place.told / "gate").unlink(missing_ok=True)
    ended = _resume(place)
    found = clean(ended, _EITHER)
    if before.outcomes and "there is no study" in ended.err:
        found.append("--resume says that there is no study")
    return found + (stored.same_or_more(before, stored.read(path)) if ended.code != 2 else [])


# Two searches at once


def _through(place: Place) -> str:
    (place.work / "link.db").symlink_to(_DATABASE)
    return "sqlite:///link.db"


def _folder_link(place: Place) -> str:
    (place.work / "linked").symlink_to(".autotune")
    return "sqlite:///linked/model.db"


def _hard(place: Place) -> str:
    os.link(place.work / _DATABASE, place.work / "hard.db")
    return "sqlite:///hard.db"


_LINKS: dict[str, Callable[[Place], str]] = {
    "by the same name": lambda place: f"sqlite:///{_DATABASE}",
    "by its whole path": lambda place: f"sqlite:///{place.work / _DATABASE}",
    "by a way round": lambda place: f"sqlite:///.autotune/../{_DATABASE}",
    "with a question": lambda place: f"sqlite:///{_DATABASE}?timeout=5",
    "through a symlink": _through,
    "through a folder's symlink": _folder_link,
    "through a hard link": _hard,
}


def _second(place: Place, link: Callable[[Place], str], executor: str) -> Complaints:
    """While a trial of the first waits, another goes for its study."""
    place.take_template()
    first = begin(place, executor)
    held = Held(place, first, "trial")
    url = link(place)
    before = stored.read(place.work / _DATABASE)
    shutil.copytree(place.told, place.root / "told-2", ignore=lambda folder, names: names)
    away = {"FAULT_TOLD": str(place.root / "told-2")}
    second = place.start(*SEARCH, "--executor", "local", "--storage", url, "-o", "other.yaml", environment=away)
    if second.comes(r" starts", LONG_S):
        second.send(signal.SIGINT)
    found = clean(second.finish(), _REFUSES, "another search is using this study")
    first.send(signal.SIGINT)
    held.release()
    found += clean(first.finish(), (0, 130))
    place.expected |= {"link.db", "linked", "hard.db", "other.yaml"}
    return found + stored.same_or_more(before, stored.read(place.work / _DATABASE))
