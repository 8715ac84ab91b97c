"""Study files that are cut, garbled, gone, elsewhere, or in use by another."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

from . import stored
from .checks import clean
from .core import Complaints, Fault
from .ended import LONG_S, Ended
from .place import Place
from .scene import SEARCH, Held, begin, set_up

KIND = "studies"
DATABASE = Path(".autotune/model.db")
REFUSED = "exit 2 that names the study; its rows are as they were"
REFUSES = (2,)
EITHER = (0, 2, 130)
_GOES_ON = (0, 130)


def faults() -> Iterator[Fault]:
    """Files, the log ahead, two searches at once."""
    for name, (harm, codes) in _FILES.items():
        yield Fault(f"the file: {name}", KIND, "local", REFUSED, partial(_with_file, harm=harm, codes=codes))
    for name in ("missing", "garbled", "cut"):
        expected = "what was stored is found, or exit 2: never no study"
        yield Fault(f"after a SIGKILL, the log ahead: {name}", KIND, "local", expected, partial(_log, harm=name))
    for name, link in _LINKS.items():
        for executor in ("local", "ray") if name == "through a symlink" else ("local",):
            expected = "exit 2: another search is using this study"
            do = partial(_second, link=link, executor=executor)
            yield Fault(f"a second search, {name}", KIND, executor, expected, do)
    reason = "root may write every file: a mode says nothing here" if os.geteuid() == 0 else ""
    do = partial(_with_file, harm=lambda path: path.chmod(0o444), codes=REFUSES)
    yield Fault("the file: read-only by its mode", KIND, "local", REFUSED, do, undefended=reason)


def resume(place: Place) -> Ended:
    """Go on until it refuses, or starts something and is stopped there."""
    running = begin(place, "local")
    if running.comes(r" starts", LONG_S):
        running.send(signal.SIGINT)
    return running.finish()


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
    "cut": (_cut, REFUSES),
    "garbled": (_garble, REFUSES),
    "text": (partial(_replace, content=b"no database at all " * 100), REFUSES),
    "one byte": (partial(_replace, content=b"\0"), EITHER),
    "empty": (partial(_replace, content=b""), EITHER),
    "a folder": (_become_folder, REFUSES),
    "a pipe": (_become_pipe, REFUSES),
    "somebody else's database": (_foreign, REFUSES),
    "a link to nowhere": (_dangle, REFUSES),
    "gone": (lambda path: path.unlink(), _GOES_ON),
    "its lock is a folder": (lambda path: Path(f"{path}.lock").mkdir(), REFUSES),
    "its lock is held": (lambda path: _hold(Path(f"{path}.lock")), REFUSES),
    "locked by another program": (lambda path: _lock(path), REFUSES),
}
_kept: list[object] = []
"""What is held until the lane's next fault."""


def _hold(path: Path) -> None:
    file = path.open("a+")
    fcntl.flock(file, fcntl.LOCK_EX)
    _kept[:] = [file]


_LOCK = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("PRAGMA locking_mode = EXCLUSIVE")
database.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


def _lock(path: Path) -> None:
    """By a process of its own: to read the file here would let go of the lock."""
    command = [sys.executable, "-c", _LOCK, str(path)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None, "asked for above"
    other.stdout.readline()
    _kept[:] = [other]


def _with_file(place: Place, harm: Callable[[Path], object], codes: Collection[int]) -> Complaints:
    place.take_template()
    path = place.work / DATABASE
    harm(path)
    before = path.read_bytes() if path.is_file() else None
    ended = resume(place)
    for one in _kept:
        if isinstance(one, subprocess.Popen):
            one.communicate()
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
    path = place.work / DATABASE
    before, log = stored.read(path), Path(f"{path}-wal")
    if log.exists():
        content = log.read_bytes()
        log.unlink() if harm == "missing" else log.write_bytes(
            content[: len(content) // 2] if harm == "cut" else bytes(reversed(content))
        )
    (place.told / "gate").unlink(missing_ok=True)
    ended = resume(place)
    found = clean(ended, EITHER)
    if before.outcomes and "there is no study" in ended.err:
        found.append("--resume says that there is no study")
    return found + (stored.same_or_more(before, stored.read(path)) if ended.code != 2 else [])


# Two searches at once


def _through(place: Place) -> str:
    (place.work / "link.db").symlink_to(DATABASE)
    return "sqlite:///link.db"


def _folder_link(place: Place) -> str:
    (place.work / "linked").symlink_to(".autotune")
    return "sqlite:///linked/model.db"


def _hard(place: Place) -> str:
    os.link(place.work / DATABASE, place.work / "hard.db")
    return "sqlite:///hard.db"


_LINKS: dict[str, Callable[[Place], str]] = {
    "by the same name": lambda place: f"sqlite:///{DATABASE}",
    "by its whole path": lambda place: f"sqlite:///{place.work / DATABASE}",
    "by a way round": lambda place: f"sqlite:///.autotune/../{DATABASE}",
    "with a question": lambda place: f"sqlite:///{DATABASE}?timeout=5",
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
    before = stored.read(place.work / DATABASE)
    shutil.copytree(place.told, place.root / "told-2", ignore=lambda folder, names: names)
    away = {"FAULT_TOLD": str(place.root / "told-2")}
    second = place.start(*SEARCH, "--executor", "local", "--storage", url, "-o", "other.yaml", environment=away)
    if second.comes(r" starts", LONG_S):
        second.send(signal.SIGINT)
    said = "hard links" if link is _hard else "another search is using this study"
    found = clean(second.finish(), REFUSES, said)
    first.send(signal.SIGINT)
    held.release()
    found += clean(first.finish(), (0, 130))
    place.expected |= {"link.db", "linked", "hard.db", "other.yaml"}
    return found + stored.same_or_more(before, stored.read(place.work / DATABASE))
