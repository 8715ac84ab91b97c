"""Bad options of every command: sizes, shares, durations, numbers, paths, names, and storages with a password."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from .checks import clean, refused
from .core import Complaints, Fault
from .ended import LONG_S
from .place import ROOT, Place
from .scene import SEARCH, SPACE, task_text

_KIND = "options"
_REFUSED = "exit 2, one message, no traceback"
_LONG = "x" * 5_000
_TASK_CPU_S = 20.0
"""Where the task is looked at before the storage is."""
_LOCAL = ("--executor", "local", "--device", "cpu")
_PLAN = (ROOT / "tests" / "golden" / "plan.yaml").read_text()

_VALUES: dict[str, tuple[str, ...]] = {
    "--budget": (
        "0%", "%", "-5%", "nan%", "inf%", "1e400%", "5%%", "%5", "0", "-1GiB", "8 apples", "8", "nan", "inf", "1e400",
        "9" * 400, "GiB", " ", "8GiB8", "\x1b[2J8GiB", "８GiB", "0x10", "0.0GiB",
    ),
    "--trials": ("0", "-1", "1.5", "nan", "many", ""),
    "--max-time": ("0s", "-5s", "nan", "inf", "1e400s", "5 parsecs", "", "9" * 400, "\x1b[2J5s"),
    "--trial-time": ("0", "-1s", "nan", "h", "9" * 400),
    "--effective-batch": ("0", "-8", "1.5", "x"),
    "--margin": ("-0.1", "1", "nan", "inf", "3%", ""),
    "--seed": ("-1", "x", "9" * 400, "1.5"),
    "--sampler": ("best", "", "\x1b[2J"),
    "--executor": ("slurm", ""),
    "--device": ("tpu", "", "cuda:0"),
    "--output": (".", "/", "/dev/null/plan.yaml", "model.py", "space.yaml", ".autotune/plan.yaml", _LONG, "x" * 300,
                 "/proc/plan.yaml", "model.py/plan.yaml", "pipe", "/dev/zero", ""),
    "--storage": (
        "sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite:////dev/null/x.db", "sqlite:///.", "sqlite:////proc/x.db",
        f"sqlite:///{_LONG}.db", "sqlite:///no/such/folder/x.db", "sqlite:///%00.db", "study.db", "nonsense://x/y", "://",
        "sqlite:///pipe", "sqlite:///model.py", "journal:///x", "\x1b[2J://x",
    ),
}  # fmt: skip
_SECRETS = (
    "postgresql://user:secret@127.0.0.1:1/autotune",
    "postgresql+psycopg2://user:secret@127.0.0.1:1/autotune",
    "postgresql+psycopg://user:secret@127.0.0.1:1/autotune",
    "postgresql+asyncpg://user:secret@127.0.0.1:1/autotune",
    "postgresql://user:secret@127.0.0.1:port/autotune",
    "postgresql://127.0.0.1:1/autotune?user=me&password=secret",
    "postgresql://user:p%40secret@127.0.0.1:1/autotune",
    "mysql://user:secret@127.0.0.1:1/autotune",
    "mysql+pymysql://user:secret@127.0.0.1:1/autotune",
    "mssql+pyodbc://user:secret@127.0.0.1:1/autotune",
    "oracle://user:secret@127.0.0.1:1/autotune",
    "redis://user:secret@127.0.0.1:1/0",
    "nonsense://user:secret@host/name",
    "sqlite://user:secret@host/name.db",
)
_COMMANDS: dict[str, tuple[str, ...]] = {
    "no command": ("",),
    "an unknown command": ("warp",),
    "an unknown option": ("search", "model.py", "--warp"),
    "an option without its value": ("search", "model.py", "--budget"),
    "search: no task": ("search",),
    "search: no such file": ("search", "nothing.py", *_LOCAL),
    "search: a folder": ("search", ".", *_LOCAL),
    "search: a path of 5,000 characters": ("search", f"{_LONG}.py", *_LOCAL),
    "search: a path of escapes": ("search", "\x1b[2J\x1b]0;t\x07.py", *_LOCAL),
    "search: two tasks": ("search", "model.py", "model.py"),
    "search: --address beside --executor local": ("search", "model.py", *_LOCAL, "--address", "127.0.0.1:1"),
    "search: cuda where there is none": ("search", "model.py", "--executor", "local", "--device", "cuda"),
    "show: no plan": ("show",),
    "show: a path of 5,000 characters": ("show", _LONG),
    "show: a path of escapes": ("show", "\x1b[2J\x1b]0;t\x07.yaml"),
    "run: a path of 5,000 characters": ("run", _LONG, "--", "true"),
    "run: no command": ("run", "golden.yaml", "--"),
    "run: an empty command": ("run", "golden.yaml", "--", ""),
    "run: no such program": ("run", "plain.yaml", "--", "/no/such/program"),
    "run: a folder as a program": ("run", "plain.yaml", "--", "/"),
    "run: a program of 5,000 characters": ("run", "plain.yaml", "--", _LONG),
    "verify: no such task": ("verify", "plain.yaml", "nothing.py", *_LOCAL[:2]),
    "verify: a plan of no task": ("verify", "plain.yaml", *_LOCAL[:2]),
    "verify: a task of 5,000 characters": ("verify", "plain.yaml", f"{_LONG}.py", *_LOCAL[:2]),
    "verify: --trial-time 0": ("verify", "plain.yaml", "model.py", "--trial-time", "0"),
    "profile: --batch 0": ("profile", "model.py", "--batch", "0"),
    "profile: --depth -1": ("profile", "model.py", "--depth", "-1"),
    "profile: --html over the task": ("profile", "model.py", "--html", "model.py"),
    "profile: --trace a folder": ("profile", "model.py", "--trace", "."),
    "profile: --html and --trace alike": ("profile", "model.py", "--html", "x", "--trace", "x"),
    "profile: --plan no file": ("profile", "model.py", "--plan", "nothing.yaml"),
    "profile: --html of 5,000 characters": ("profile", "model.py", "--html", _LONG),
    "estimate: --budget 0%": ("estimate", "model.py", "--budget", "0%"),
    "estimate: --device-memory on a CPU": ("estimate", "model.py", "--device", "cpu", "--device-memory", "8GiB"),
    "estimate: cuda of no size": ("estimate", "model.py", "--device", "cuda"),
    "init: over a file": ("init", "model.py"),
    "init: a folder": ("init", "."),
    "init: in no folder": ("init", "/dev/null/model.py"),
    "init: 5,000 characters": ("init", f"{_LONG}.py"),
}


def faults() -> Iterator[Fault]:
    """Values of ``search``'s options, storages with a password, the other commands'."""
    for option, values in _VALUES.items():
        for value in values:
            name = f"{option} {_short(value)}"
            executor = "local" if option == "--storage" else "none"
            yield Fault(name, _KIND, executor, _REFUSED, partial(_value, option=option, value=value))
    for url in _SECRETS:
        for command in ("search", "estimate") if url in _SECRETS[:2] else ("search",):
            expected = "exit 2, and the password is never printed"
            yield Fault(
                f"{command} --storage {url}", _KIND, "local", expected, partial(_secret, url=url, command=command)
            )
    for name, arguments in _COMMANDS.items():
        yield Fault(name, _KIND, "none", _REFUSED, partial(_command, arguments=arguments))
    for budget, (expected, task, codes, word) in _SEARCHED.items():
        do = partial(_searched, budget=budget, task=task, codes=codes, word=word)
        yield Fault(f"--budget {budget}, tried", _KIND, "local", expected, do)


def _short(value: str) -> str:
    return f"{value[:20]!r}… of {len(value)}" if len(value) > 40 else repr(value)


def _files(place: Place) -> None:
    place.write("model.py", task_text())
    place.write("space.yaml", SPACE)
    place.write("golden.yaml", _PLAN)
    place.write("plain.yaml", "schema: autotune/plan@1\nsettings: {}\n")
    os.mkfifo(place.work / "pipe")
    place.expected.add("pipe")


def _value(place: Place, option: str, value: str) -> Complaints:
    _files(place)
    before = {path.name: path.read_bytes() for path in place.work.iterdir() if path.is_file()}
    ended = place.run("search", "model.py", *_LOCAL, "--space", "space.yaml", option, value)
    changed = [name for name, content in before.items() if (place.work / name).read_bytes() != content]
    litter = [path.name for path in _below(place.work / ".autotune") if path.suffix != ".db"]
    return (
        refused(ended, most_cpu_s=_TASK_CPU_S)
        + [f"changed: {name}" for name in changed]
        + [f"litter: {name}" for name in litter]
    )


def _below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "model.db.lock"]


def _secret(place: Place, url: str, command: str) -> Complaints:
    _files(place)
    options = ("--space", "space.yaml", "--device", "cpu", *(("--executor", "local") if command == "search" else ()))
    ended = place.run(command, "model.py", *options, "--storage", url)
    found = ["the password was printed"] if "secret" in ended.out + ended.err else []
    if "mysql" in url and "psycopg" in ended.err:
        found.append("PostgreSQL's driver is advised for MySQL")
    return found + refused(ended, most_cpu_s=_TASK_CPU_S)


def _command(place: Place, arguments: tuple[str, ...]) -> Complaints:
    _files(place)
    return refused(place.run(*arguments))


def _searched(place: Place, budget: str, task: str, codes: tuple[int, ...], word: str) -> Complaints:
    """A search under a budget, ended by Ctrl-C once its reference was measured and a trial began."""
    place.write("model.py", task)
    place.write("space.yaml", SPACE)
    running = place.start(*SEARCH, "--executor", "local", "--budget", budget)
    if running.comes(r"\] trial \d+ starts", LONG_S):
        running.send(signal.SIGINT)
    ended = running.finish()
    refused_as_text = ["refused as no size"] if "not a size" in ended.err else []
    return refused_as_text + clean(ended, codes, word, of_user=task == _FAILS)


_FAILS = task_text().replace("    inputs, targets = batch\n", "    raise ValueError('never')\n")
_TOLD_AT_ONCE = "below what the process takes before the model is built: exit 2, with figures"
_SEARCHED: dict[str, tuple[str, str, tuple[int, ...], str]] = {
    "120%": ("allowed, and said: a plan", task_text(), (0, 130), "120"),
    "99%": ("of the reference's peak: 0, 3 or 130", task_text(), (0, 3, 130), "99"),
    "1%": (_TOLD_AT_ONCE, task_text(), (2,), "MiB"),
    "16MiB": (_TOLD_AT_ONCE, task_text(), (2,), "MiB"),
    "90%": ("of a job that fails: exit 2, with the job's error", _FAILS, (2,), "never"),
}
