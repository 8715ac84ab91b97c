"""Tasks as another user than the server's: what they can do to it, to others' searches, and after their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from service_runs import ENDS, OPTIONS, bearer, serving, submit, until

from autotune.errors import UserError
from autotune.service.driver import SearchFolder
from autotune.service.users import User, find_user
from autotune.workers.local import TURNS

PYTHON = "/usr/bin/python3"
"""One that any user can start; that of the tests may be in somebody's home."""
STRANGER = User("stranger", 54321, 54321)
HERE = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="root alone starts processes of other users"),
    pytest.mark.skipif(not os.access(PYTHON, os.X_OK), reason=f"there is no {PYTHON}"),
]

ATTACK = r"""
import ctypes, json, os, pathlib, sys
said = json.loads(pathlib.Path(sys.argv[-1]).read_text())
state, server, other = pathlib.Path(said["state"]), said["server"], said["other"]
held = {}

def attempt(name, do):
    try:
        do()
        held[name] = False
    except OSError:
        held[name] = True

def trace():
    if ctypes.CDLL(None).ptrace(16, server, 0, 0) != 0:
        raise OSError

attempt("write the database", lambda: open(state / "service.db", "r+b"))
attempt("read the database", lambda: open(state / "service.db", "rb"))
attempt("replace the database", lambda: os.rename(state / "service.db", state / "old.db"))
attempt("the server's environment", lambda: open(f"/proc/{server}/environ", "rb").read())
attempt("the server's memory", lambda: open(f"/proc/{server}/mem", "rb"))
attempt("trace the server", trace)
attempt("end the server", lambda: os.kill(server, 0))
attempt("others' code", lambda: open(state / "searches" / other / "work" / "model.py"))
attempt("others' folder", lambda: os.listdir(state / "searches" / other))
attempt("others' searches", lambda: os.listdir(state / "searches"))
attempt("archives", lambda: os.listdir(state / "archives"))
attempt("what others measured", lambda: open(state / "measurements.db", "ab"))
attempt("the state's own name", lambda: open(state / "home"))
attempt("a folder in the state", lambda: os.mkdir(state / "x"))
attempt("root again", lambda: os.setuid(0))
for name in ("driver.log", "result.json", "progress-1.jsonl", "plan.yaml"):
    path = pathlib.Path("..", name)
    path.unlink(missing_ok=True)
    path.symlink_to(state / "secret.txt")
os.makedirs(".autotune")
os.symlink(state, ".autotune/s-1")
if os.fork() == 0:
    os.setsid()
    os.execve("/bin/sleep", ["sleep", "3600"], {})
told = {"held": held, "had": dict(os.environ), "ids": [os.getuid(), os.getgid(), os.getgroups()]}
pathlib.Path("told.json").write_text(json.dumps(told))
sys.exit(3)
"""


@pytest.fixture
def place():
    """A folder that every user may pass through, as that of the tests need not be."""
    folder = Path(tempfile.mkdtemp(prefix="autotune-run-as-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


def options(*program):
    return replace(OPTIONS, num_searches=1, program=(PYTHON, *program), run_as=STRANGER)


def alive(uid):
    """Commands of all that runs as a user; init may not have waited yet for what has ended."""
    found = subprocess.run(["ps", "-o", "stat=,args=", "-U", str(uid)], capture_output=True, text=True)
    return [line for line in found.stdout.splitlines() if not line.startswith("Z")]


@pytest.fixture
def driver(place):
    """The stand-in, where any user can read it."""
    return shutil.copy(HERE / "service_driver.py", place)


def test_a_task_of_another_user_reaches_nothing_of_the_servers_or_of_others(place, driver, monkeypatch):
    """Fifteen attempts, and none succeeds: the database, the server's environment, memory and process, other owners'
    files. It has an environment that is named in full, and folders of its own. What it puts in place of its log, plan,
    events and trials' logs, links to the server's files, is read by nobody, and a daemon that has shed its mark and
    session ends with it."""
    monkeypatch.setenv("AUTOTUNE_DATABASE", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("XDG_CACHE_HOME", "/root/.cache")
    state = place / "state"
    with serving(state, options(driver)) as (client, service):
        other = submit(client, trials=1)
        assert until(client, other, *ENDS)["state"] == "SUCCEEDED"
        assert [path.name for path in state.iterdir() if path.is_file() and path.stat().st_mode & 0o077] == []
    for name in ("secret.txt", "trial-001.log"):
        (state / name).write_text("schema: autotune/plan@1\nsettings: {}\n# top secret\n")
    (place / "attack.py").write_text(ATTACK)
    with serving(state, options(str(place / "attack.py"))) as (client, service):
        client.headers.update(bearer(service.tokens.create("bob", "submit", 3600.0)[1]))
        search_id = submit(client, state=str(state), server=os.getpid(), other=other)
        search = until(client, search_id, *ENDS)
        assert search["state"] == "NOTHING_FITS", search
        folder = service.places.search(search_id)
        told = json.loads((folder.work / "told.json").read_text())
        assert {name for name, is_held in told["held"].items() if not is_held} == set()
        assert len(told["held"]) == 15
        assert told["ids"] == [STRANGER.uid, STRANGER.gid, []]
        assert not [name for name, value in told["had"].items() if "secret" in value or "root/.cache" in value]
        assert told["had"][TURNS], "it takes no turns with the service's other searches"
        assert {told["had"][name].removeprefix(f"{folder.path}/") for name in ("HOME", "TMPDIR")} == {"home", "tmp"}
        shown = [client.get(f"/v1/searches/{search_id}/{what}").text for what in ("log", "plan", "report", "events")]
        assert "top secret" not in f"{shown} {search} {folder.read_trial_log('s-1', 1)} {folder.read_documents()}"
        assert alive(STRANGER.uid) == []
        assert (state / "searches" / search_id).stat().st_uid == 0


def test_a_search_of_another_user_comes_to_its_plan_and_goes_on_after_its_driver_died(place, driver):
    """Its files are the user's while it runs, and the server's alone before and after."""
    with serving(place / "state", options(driver)) as (client, service):
        search_id = submit(client, trials=3, dies_at=1)
        search = until(client, search_id, *ENDS)
        assert (search["state"], search["attempt"]) == ("SUCCEEDED", 2)
        assert client.get(f"/v1/searches/{search_id}/plan").text == "schema: autotune/plan@1\nsettings: {}\n"
        assert "the driver speaks" in client.get(f"/v1/searches/{search_id}/log").text
        folder = service.places.search(search_id).path
        assert (folder.stat().st_uid, folder.stat().st_mode & 0o777) == (0, 0o700)
        assert (folder / "proof").stat().st_uid == STRANGER.uid
        assert (folder / "measurements.db").is_file()


def test_what_a_task_links_to_is_not_given_to_its_user(place):
    """A second name of a file of the server's, where the system lets users make one, and a link."""
    secret = place / "secret"
    secret.write_text("top secret")
    folder = SearchFolder(place / "search")
    folder.work.mkdir(parents=True)
    folder.plan.write_text("schema: autotune/plan@1\nsettings: {}\n")
    assert folder.read_documents() is not None
    os.link(secret, folder.log)
    os.link(secret, folder.work / "model.py")
    folder.result.symlink_to(secret)
    STRANGER.give(folder.path)
    assert (secret.stat().st_uid, folder.work.stat().st_uid) == (0, STRANGER.uid)
    assert (folder.read_log(), folder.read_error(), folder.read_documents()) == ("", ("", ""), None)
    with pytest.raises(OSError, match="no plain file"):
        folder.begin_output()
    assert secret.read_text() == "top secret"


def test_who_can_be_no_user_of_tasks_is_refused(here, place):
    for name, words in (("root", "not root"), ("nobody-of-that-name", "no such user")):
        ended = here("serve", "--run-as", name, "--executor", "local", cwd=place)
        assert (ended.returncode, words in ended.stderr) == (2, True)
    for more in (("--executor", "ray"), ("--executor", "local", "--searches", "2")):
        ended = here("serve", "--run-as", "daemon", *more, cwd=place)
        assert (ended.returncode, "--searches 1 and --executor local were expected" in ended.stderr) == (2, True)
    assert find_user("daemon").uid != 0
    STRANGER.check((PYTHON,), place)
    with pytest.raises(UserError, match=f"--run-as stranger: it cannot start {place}/none in {place}: .*No such file"):
        STRANGER.check((f"{place}/none",), place)
