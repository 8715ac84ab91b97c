"""What tasks do: to the service, without ``--run-as`` as its own user, and with it as another."""

from __future__ import annotations

import json
import os
import pwd
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.apart import may_mount, passable

from .core import FAILS, ROOT, Attack, Scene, attempts, bound, job, settle, start, until
from .shown import HTML_TASK

_PUT = """
import os, pathlib
for name in ("plan.yaml", "driver.log", "result.json", "progress-1.jsonl"):
    path = pathlib.Path("..", name)
    path.unlink(missing_ok=True)
    {}
raise RuntimeError("done")
"""
_TELL = """
import pathlib
with pathlib.Path("../progress-1.jsonl").open("a") as file:
    file.write({!r} + "\\n")
raise RuntimeError("done")
"""
_PLAN = "import pathlib\npathlib.Path('../plan.yaml').write_text({!r})\nraise RuntimeError('done')\n"
_SHADOW = "import pathlib, sys\nif 'search' in sys.argv: pathlib.Path({marker!r}).touch()\n"
_DAEMON = """
import os, pathlib, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        pathlib.Path("daemon.pid").write_text(str(os.getpid()))
        os.execve("/bin/sleep", ["sleep", "3600"], {})
    os._exit(0)
while not pathlib.Path("daemon.pid").exists():
    time.sleep(0.01)
time.sleep(0.2)
raise RuntimeError("done")
"""


@dataclass(frozen=True)
class Task:
    """A job, and how its search may end."""

    model: str = FAILS
    files: Mapping[str, str] = field(default_factory=dict)
    ends: tuple[str, ...] = ("FAILED",)


def _space(text: str) -> Task:
    return Task(files={"space__yaml": text})


_LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
_BEST = {"settings": "x", "words": "x", "is_best": True, "fits": True, "samples_per_s": 1e9, "outcome": "measured"}
_FORGED = (
    {"event": "state", "state": "SUCCEEDED"},
    {"event": "end", "search": "0" * 16},
    {"event": "x'; DROP TABLE events; --"},
    {"event": "trial_ended", "number": -1, **_BEST},
    {"event": "trial_ended", "number": 2**70, **_BEST},
    {"event": "trial_ended", "number": "1", **_BEST},
    {"event": "trial_ended", "number": 1, **_BEST, "outcome": "a\0"},
    {"event": "search_started", "study": "../../..", "num_trials": 1, "limit_bytes": 1, "resumed": []},
)
_LINES = [
    *(json.dumps({"time": 1.0, **each}) for each in _FORGED),
    "null",
    '{"event": "inspected", "words": ' + "[" * 100_000,
]
_LIBRARIES = ("autotune", "sitecustomize", "usercustomize", "yaml", "optuna", "pydantic", "rich", "sqlite3")
_LATE = ("FAILED", "ERROR")
"""It is tried again: what it did to its own folder could be the machine's."""
TASKS = {
    "its folder is removed": Task("import os, shutil\nshutil.rmtree(os.getcwd())\n" + FAILS, ends=_LATE),
    "links to the database": Task(_PUT.format("path.symlink_to(os.path.abspath('../../../service.db'))"), ends=_LATE),
    "second names of the database": Task(_PUT.format("os.link('../../../service.db', path)"), ends=_LATE),
    "pipes": Task(_PUT.format("os.mkfifo(path)"), ends=_LATE),
    "folders": Task(_PUT.format("path.mkdir()"), ends=_LATE),
    "HTML": Task(HTML_TASK),
    "files named as libraries": Task(files=dict.fromkeys((f"{each}__py" for each in _LIBRARIES), _SHADOW)),
    "a space of a billion laughs": _space(f"schema: autotune/space@1\n{_LAUGHS}"),
    "a space that runs code": _space("!!python/object/apply:os.system ['touch {marker}']"),
    "a space within itself": _space("&a [*a]"),
    "a space of brackets": _space("[" * 100_000),
    "a space with a field twice": _space("schema: autotune/space@1\nbatch: [1]\nbatch: [2]\n"),
    "a space of numbers without end": _space(f"schema: autotune/space@1\nbatch: [{'9' * 100_000}]\n"),
    "a space with a null": _space("schema: autotune/space@1\0\n"),
    "a space that is a list": _space("- 1\n"),
    "a space that includes another": _space("schema: !include /etc/passwd\n"),
    "events of ends, trials and studies that are none": Task(_TELL.format("\n".join(_LINES))),
    "an event without end": Task(_TELL.format('{"event": "' + "x" * 3_000_000)),
    "a plan of its own": Task(_PLAN.format("schema: autotune/plan@1\nsettings: {}\n")),
    "a plan that runs code": Task(_PLAN.format("!!python/object/apply:os.system ['touch {marker}']")),
    "an exit": Task("import os\nos._exit(0)\n"),
    "SystemExit": Task("raise SystemExit(0)\n"),
    "an error without words": Task("class E(Exception):\n    def __str__(self): raise E\nraise E\n"),
    "an error of 5 MB": Task("raise RuntimeError('x' * 5_000_000)\n"),
    "an error with a null and half a letter": Task("raise RuntimeError('a\\0\\ud800\\x1b[2J')\n"),
    "calls without end": Task("def f(): f()\nf()\n"),
    "20 MB are printed": Task("print('x' * 20_000_000, flush=True)\n" + FAILS),
    "functions that do nothing": Task("x = 1\n"),
    "no Python": Task("\0\0\0"),
    "a daemon without mark and session": Task(_DAEMON),
}
_SUBMITTED: dict[str, str] = {}
"""Ids by names."""


def submit_tasks(the: Scene) -> None:
    """Queue all of them."""
    service = the.services["tasks"]
    marker = str(the.folder / "marker")
    with service.client("mallory") as client:
        for number, (name, task) in enumerate(TASKS.items()):
            files = {
                each: text.replace("{marker!r}", repr(marker)).replace("{marker}", marker)
                for each, text in task.files.items()
            }
            folder = job(the.folder / f"job-{number}", task.model.replace("{marker}", marker), **files)
            more = {"space": "space.yaml"} if "space__yaml" in files else {}
            _SUBMITTED[name] = client.submit(folder, task="model.py", name=name, **more)["id"]


def _done(the: Scene, name: str) -> str | None:
    """It ends as its owner's mistake; nothing of the service's is shown, changed or run."""
    search_id = _SUBMITTED[name]
    with the.services["tasks"].client("mallory") as client:
        search = client.wait(search_id)
    if search["state"] not in TASKS[name].ends:
        return f"{search['state']}: {search['message'][:200]}"
    texts = ("/log", "/plan", "/report", "/events", "/trials", "/files", "/trials/0/log", "")
    shown = [the.ask("GET", f"/v1/searches/{search_id}{each}", "mallory", "tasks") for each in texts]
    if any(b"SQLite format" in each.content or b"CREATE TABLE" in each.content for each in shown):
        return "the database is shown"
    if (the.folder / "marker").exists():
        return "its code ran where none of it may"
    if "a bug" in search["message"] or search["has_plan"]:
        return search["message"][:200] or "a plan"
    if len(search["message"]) > 5000 or "\0" in search["message"]:
        return f"a message of {len(search['message'])}"
    pid = the.services["tasks"].state / "searches" / search_id / "work" / "daemon.pid"
    if name.startswith("a daemon"):
        until(
            lambda: not Path("/proc", pid.read_text(), "exe").is_symlink() or not _sleeps(pid.read_text()),
            "its end",
            20,
        )
    return None


def _sleeps(pid: str) -> bool:
    try:
        return b"sleep" in Path("/proc", pid, "cmdline").read_bytes()
    except OSError:
        return False


def tasks() -> Iterator[Attack]:
    """Jobs that harm: each ends as what it is, and the service goes on."""
    yield from attempts(_done, list(TASKS))


_TRIES = r"""
import ctypes, glob, json, os, pathlib, socket, subprocess, sys, urllib.request
said = json.loads(pathlib.Path(__file__).with_name("said.json").read_text())
state, server, other = pathlib.Path(said["state"]), said["server"], said["other"]
held = {}

def attempt(name, do):
    try:
        held[name] = bool(do() == "held")
    except Exception:
        held[name] = True

def trace(pid):
    if ctypes.CDLL(None).ptrace(16, pid, 0, 0) != 0:
        raise OSError

def ask(path, **more):
    with urllib.request.urlopen(said["url"] + path, **more) as answer:
        return answer.read()

def run(*command):
    if subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=10).returncode:
        raise OSError

def names(mark):
    return "held" if not [k for k, v in os.environ.items() if mark in v] else "not"

attempt("write the database", lambda: open(state / "service.db", "r+b"))
attempt("read the database", lambda: open(state / "service.db", "rb"))
attempt("replace the database", lambda: os.rename(state / "service.db", state / "old.db"))
attempt("remove the database", lambda: os.unlink(state / "service.db"))
attempt("the database's log", lambda: open(state / "service.db-wal", "rb"))
attempt("the lock", lambda: open(state / "lock", "ab"))
attempt("the state's name", lambda: open(state / "home", "rb"))
for name in ("environ", "mem", "maps", "auxv", "stack", "syscall"):
    attempt(f"the server's {name}", lambda: open(f"/proc/{server}/{name}", "rb").read(1))
attempt("the server's files", lambda: os.listdir(f"/proc/{server}/fd"))
attempt("the server's folder", lambda: os.listdir(f"/proc/{server}/cwd"))
attempt("the server's root", lambda: os.listdir(f"/proc/{server}/root"))
attempt("trace the server", lambda: trace(server))
attempt("end the server", lambda: os.kill(server, 0))
attempt("the server's priority", lambda: os.setpriority(os.PRIO_PROCESS, server, 19))
attempt("end init", lambda: os.kill(1, 0))
attempt("others' code", lambda: open(state / "searches" / other / "work" / "model.py"))
attempt("others' log", lambda: open(state / "searches" / other / "driver.log"))
attempt("others' folder", lambda: os.listdir(state / "searches" / other))
attempt("write to others", lambda: open(state / "searches" / other / "plan.yaml", "w"))
attempt("others' searches", lambda: os.listdir(state / "searches"))
attempt("archives", lambda: os.listdir(state / "archives"))
attempt("another archive", lambda: open(state / "archives" / said["archive"], "rb"))
attempt("what others measured", lambda: open(state / "measurements.db", "ab"))
attempt("a file in the state", lambda: open(state / "x", "w"))
attempt("a folder of a search to come", lambda: os.mkdir(state / "searches" / ("0" * 16)))
attempt("root again", lambda: os.setuid(0))
attempt("root's group", lambda: os.setgid(0))
attempt("by sudo", lambda: run("sudo", "-n", "true"))
attempt("by su", lambda: run("su", "-c", "true"))
attempt("a node of the disk", lambda: os.mknod("disk", 0o60600, os.makedev(8, 0)))
attempt("the memory of the machine", lambda: open("/dev/mem", "rb"))
attempt("a mount", lambda: run("mount", "-t", "tmpfs", "x", "/mnt"))
attempt("the shadow file", lambda: open("/etc/shadow"))
attempt("the users", lambda: open("/etc/passwd", "a"))
attempt("cron", lambda: open("/etc/cron.d/x", "w"))
attempt("the product's code", lambda: open(said["product"], "a"))
attempt("Python's packages", lambda: open(pathlib.Path(json.__file__).parent / "x.pth", "w"))
attempt("the admin's home", lambda: os.listdir(said["home"]))
attempt("a secret by name", lambda: "held" if "HF_TOKEN" not in os.environ else "not")
attempt("a secret by value", lambda: names("very-secret"))
attempt("a token by value", lambda: names("atn_"))
attempt("the server's own HOME", lambda: "held" if os.environ["HOME"].startswith(str(state)) else "not")
driver = open(f"/proc/{os.getppid()}/environ", "rb").read()
attempt("the driver's environment", lambda: "held" if b"very-secret" not in driver else "not")
attempt("ask without a token", lambda: ask("/v1/searches"))
attempt("ask as this machine", lambda: ask("/v1/tokens"))
attempt("groups", lambda: "held" if 0 not in [os.getgid(), os.getegid(), *os.getgroups()] else "not")
attempt("capabilities", lambda: "held" if "CapEff:\t0000000000000000" in open("/proc/self/status").read() else "not")
opened = [os.path.realpath(path) for path in glob.glob("/proc/self/fd/*")]
attempt("open files", lambda: "held" if not [path for path in opened if "service.db" in path] else "not")
for name in ("driver.log", "progress-1.jsonl", "plan.yaml"):
    path = pathlib.Path("..", name)
    path.unlink(missing_ok=True)
    path.symlink_to(state / "secret.txt")
if os.fork() == 0:
    os.setsid()
    os.execve("/bin/sleep", ["sleep", "3600"], {})
pathlib.Path("told.json").write_text(json.dumps(held))
raise RuntimeError("done")
"""


def why_not() -> str | None:
    """Why no task can be run as another user here."""
    if os.geteuid() != 0:
        return "root alone starts processes of other users"
    if not may_mount():
        return "no mounts of one's own: the interpreter may be in a folder that others may not pass"
    return None if _user() else "no user that nothing runs as"


@cache
def _user() -> str | None:
    """A system's user that nothing runs as."""
    busy = set(subprocess.run(["ps", "axo", "uid="], capture_output=True, text=True, check=True).stdout.split())
    found = (each.pw_name for each in pwd.getpwall() if 0 < each.pw_uid < 1000 and str(each.pw_uid) not in busy)
    return next((name for name in ("games", "news", "uucp", "irc") if name in {*found}), None)


@cache
def _tried(the_id: int) -> dict[str, bool]:
    """What the task says that held, and what is seen from outside."""
    the = _SCENES[the_id]
    the.folder.chmod(0o711)
    user = _user()
    service = start(the, "apart", f"--run-as={user}", before=passable())
    settle(the, service)
    with service.client("ann") as client:
        other = client.submit(
            job(the.folder / "apart-ann", FAILS, space__yaml="- 1\n"), task="model.py", space="space.yaml"
        )
        client.wait(other["id"])
    (service.state / "secret.txt").write_text("schema: autotune/plan@1\nsettings: {}\n# top secret\n")
    said = {
        "state": str(service.state),
        "server": service.process.pid,
        "other": other["id"],
        "url": service.url,
        "archive": other["spec"]["archive"],
        "product": str(ROOT / "autotune" / "__init__.py"),
        "home": str(Path.home()) if Path.home().stat().st_mode & 0o005 == 0 else "/root/none",
    }
    folder = job(the.folder / "apart-mallory", _TRIES, said__json=json.dumps(said))
    with service.client("mallory") as client:
        search = client.wait(client.submit(folder, task="model.py")["id"])
    place = service.state / "searches" / search["id"]
    held: dict[str, bool] = json.loads((place / "work" / "told.json").read_text())
    texts = ("/log", "/plan", "/report", "/events", "/trials", "")
    shown = "".join(the.ask("GET", f"/v1/searches/{search['id']}{each}", "mallory", "apart").text for each in texts)
    held["links in place of its log, plan and events"] = "top secret" not in shown
    ps = ["ps", "-o", "stat=,args=", "-U", str(user)]
    left = subprocess.run(ps, capture_output=True, text=True).stdout.splitlines()
    held["a daemon without mark and session"] = not [each for each in left if not each.startswith("Z")]
    held["its folder, once it has ended"] = (place.stat().st_uid, place.stat().st_mode & 0o777) == (0, 0o700)
    held["it ends as its own mistake"] = search["state"] == "FAILED"
    return held


_SCENES: dict[int, Scene] = {}
_AFTER = ("links in place of its log, plan and events", "a daemon without mark and session")
_AFTER = (*_AFTER, "its folder, once it has ended", "it ends as its own mistake")


def _apart(the: Scene, name: str) -> str | None:
    _SCENES[id(the)] = the
    found = _tried(id(the)).get(name)
    return None if found else f"it did not hold: {found}"


def apart() -> Iterator[Attack]:
    """A task with ``--run-as``, on the server's database, environment, memory and processes, and on others' files."""
    if why_not() is None:
        loops = {f"the server's {each}" for each in ("environ", "mem", "maps", "auxv", "stack", "syscall")}
        for name in (*re.findall(r'attempt\("([^"]+)"', _TRIES), *sorted(loops), *_AFTER):
            yield Attack(name, bound(_apart, name=name))
