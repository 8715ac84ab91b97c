"""Tasks as another user than the server's: what they can do to it, to others' searches, and after their own."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from apart import may_mount, passable
from service_runs import ENDS, OPTIONS, bearer, free_port, serving, spec, submit, until
from sqlalchemy import select

from autotune.batch.turns_of_server import SOCKET
from autotune.errors import UserError
from autotune.service.client import Client
from autotune.service.driver import SearchFolder
from autotune.service.service import open_database
from autotune.service.store.tables import SEARCHES
from autotune.service.store.tokens import Tokens
from autotune.service.users import User, Users
from autotune.workers.process import with_variable

PYTHON = "/usr/bin/python3"
"""One that any user can start; that of the tests may be in somebody's home."""
FIRST = 200_000 + 10 * os.getpid()
"""Of numbers that no other process of tests has: all that runs as one of them is ended."""
NUMBERS = {"stranger": FIRST, "t-ann": FIRST + 1, "t-bob": FIRST + 2, "t-cat": FIRST + 2, "t-dan": FIRST + 3}
"""Users of the tests: cat's is bob's by another name."""
STRANGER = User("stranger", FIRST, FIRST, (FIRST,))
HERE = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="root alone starts processes of other users"),
    pytest.mark.skipif(not os.access(PYTHON, os.X_OK), reason=f"there is no {PYTHON}"),
]

ATTEMPTS = r"""
state, other = pathlib.Path(said["state"]), said["other"]
held = {}

def attempt(name, do):
    try:
        do()
        held[name] = False
    except PermissionError:
        held[name] = True

def trace(process):
    if ctypes.CDLL(None).ptrace(16, process, 0, 0) != 0:
        raise PermissionError

attempt("write the database", lambda: open(state / "service.db", "r+b"))
attempt("read the database", lambda: open(state / "service.db", "rb"))
attempt("replace the database", lambda: os.rename(state / "service.db", state / "old.db"))
for whose, process in said["processes"].items():
    attempt(f"{whose} environment", lambda: open(f"/proc/{process}/environ", "rb").read())
    attempt(f"{whose} memory", lambda: open(f"/proc/{process}/mem", "rb"))
    attempt(f"trace {whose} process", lambda: trace(process))
    attempt(f"end {whose} process", lambda: os.kill(process, 0))
attempt("others' code", lambda: open(state / "searches" / other / "work" / "model.py"))
attempt("others' study", lambda: open(state / "searches" / other / "study.db", "ab"))
attempt("others' plan", lambda: open(state / "searches" / other / "plan.yaml", "w"))
attempt("others' folder", lambda: os.listdir(state / "searches" / other))
attempt("others' searches", lambda: os.listdir(state / "searches"))
attempt("archives", lambda: os.listdir(state / "archives"))
attempt("what others measured", lambda: open(state / "measurements.db", "ab"))
attempt("the state's own name", lambda: open(state / "home"))
attempt("a folder in the state", lambda: os.mkdir(state / "x"))
attempt("root again", lambda: os.setuid(0))
"""
"""What a task tries; ``said`` is whom with."""
ATTACK = rf"""
import ctypes, json, os, pathlib, sys
said = json.loads(pathlib.Path(sys.argv[-1]).read_text())
{ATTEMPTS}
for name in ("driver.log", "result.json", "progress-1.jsonl", "plan.yaml"):
    path = pathlib.Path("..", name)
    path.unlink(missing_ok=True)
    path.symlink_to(state / "secret.txt")
os.makedirs(".autotune")
os.symlink(state, ".autotune/s-1")
if os.fork() == 0:
    os.setsid()
    os.execve("/bin/sleep", ["sleep", "3600"], dict())
told = dict(held=held, had=dict(os.environ), ids=[os.getuid(), os.getgid(), os.getgroups()])
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


@pytest.fixture(autouse=True)
def users(monkeypatch):
    """The system's, by their names: as if those of the tests were among them."""
    found = {name: pwd.struct_passwd((name, "x", uid, uid, "", "/", "/bin/sh")) for name, uid in NUMBERS.items()}
    found |= {each.pw_name: each for each in pwd.getpwall()}
    monkeypatch.setattr(pwd, "getpwnam", found.__getitem__)
    monkeypatch.setattr(pwd, "getpwuid", {each.pw_uid: each for each in found.values()}.__getitem__)
    return found


def options(*program, name="stranger", searches=1):
    return replace(OPTIONS, num_searches=searches, program=(PYTHON, *program), run_as=Users(name))


def alive(uid):
    """Commands of all that runs as a user; init may not have waited yet for what has ended."""
    found = subprocess.run(["ps", "-o", "stat=,args=", "-U", str(uid)], capture_output=True, text=True)
    return [line for line in found.stdout.splitlines() if not line.startswith("Z")]


@pytest.fixture
def driver(place):
    """The stand-in, where any user can read it."""
    return shutil.copy(HERE / "service_driver.py", place)


def test_a_task_of_another_user_reaches_nothing_of_the_servers_or_of_others(place, driver, monkeypatch):
    """None of many attempts succeeds: the database, the server's environment, memory and process, other owners' files.
    It has an environment that is named in full, and folders of its own. What it puts in place of its log, plan, events
    and trials' logs, links to the server's files, is read by nobody, and a daemon that has shed its mark and
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
        search_id = submit(client, state=str(state), processes={"the server's": os.getpid()}, other=other)
        search = until(client, search_id, *ENDS)
        assert search["state"] == "NOTHING_FITS", search
        folder = service.places.search(search_id)
        told = json.loads((folder.work / "told.json").read_text())
        assert {name for name, is_held in told["held"].items() if not is_held} == set()
        assert len(told["held"]) == 17
        assert told["ids"] == [STRANGER.uid, STRANGER.gid, [STRANGER.gid]]
        assert not [name for name, value in told["had"].items() if "secret" in value or "root/.cache" in value]
        assert told["had"][SOCKET], "it takes no turns with the service's other searches"
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
    for name, words in (
        ("root", "it is root"),
        ("nobody-of-that-name", "no such user"),
        ("{owner}", "more than the owner's"),
    ):
        ended = here("serve", "--run-as", name, "--executor", "local", cwd=place)
        assert (ended.returncode, words in " ".join(ended.stderr.split())) == (2, True)
    ended = here("serve", "--run-as", "daemon", "--executor", "ray", cwd=place)
    assert (ended.returncode, "--executor local was expected" in ended.stderr) == (2, True)
    assert Users("daemon").find("ann").uid != 0
    STRANGER.check((PYTHON,), place)
    with pytest.raises(UserError, match=f"--run-as stranger: it cannot start {place}/none in {place}: .*No such file"):
        STRANGER.check((f"{place}/none",), place)


@contextmanager
def by_owner(state, program, *names, searches):
    """Of a service with a user for each owner: what submits as one of them, the service's client, and the service."""
    with serving(state, options(program, name="t-{owner}", searches=searches)) as (client, service):
        tokens = {name: bearer(service.tokens.create(name, "submit", 3600.0)[1]) for name in names}

        def submit_as(name, priority=50, **script):
            client.headers.update(tokens[name])
            answer = client.post("/v1/searches", json={**spec(client, **script), "priority": priority})
            return answer.json()["id"] if answer.status_code == 201 else answer

        yield submit_as, client, service


def hold(client, service, search_id):
    """Wait until its driver is where it was told to wait; what lets it go."""
    folder = service.places.search(search_id).path
    while not (folder / "held").exists():
        until(client, search_id, "QUEUED", "LEASED", "RUNNING")
        time.sleep(0.02)
    return (folder / "go").touch


def test_searches_of_different_users_run_at_a_time_and_two_of_one_never_do(place, driver):
    """Bob's begins beside Ann's, though another of hers is before it in the queue, which waits for her user; one of
    Cat's waits for Bob's, for theirs is one user by two names."""
    with by_owner(place / "state", driver, "ann", "bob", "cat", searches=3) as (submit_as, client, service):
        ann = submit_as("ann", trials=1, holds_at="reference")
        go_ann = hold(client, service, ann)
        next_of_ann = submit_as("ann", priority=90, trials=1)
        bob = submit_as("bob", trials=1, holds_at="reference")
        cat = submit_as("cat", trials=1)
        go_bob = hold(client, service, bob)
        uids = [service.places.search(each).path.stat().st_uid for each in (ann, bob)]
        assert uids == [NUMBERS["t-ann"], NUMBERS["t-bob"]]
        assert {until(client, each, "QUEUED")["attempt"] for each in (next_of_ann, cat)} == {0}
        go_bob()
        other = until(client, cat, *ENDS)
        assert until(client, ann, "RUNNING")["attempt"] == 1  # the end of Bob's and Cat's has left Ann's alone
        go_ann()
        found = [until(client, each, *ENDS) for each in (ann, bob, next_of_ann)]
    assert [each["state"] for each in (*found, other)] == ["SUCCEEDED"] * 4
    assert found[0]["ended_at"] <= found[2]["started_at"]
    assert found[1]["ended_at"] <= other["started_at"]


def test_one_user_for_all_has_one_search_at_a_time(place, driver):
    with serving(place / "state", options(driver, searches=3)) as (client, service):
        first = submit(client, trials=1, holds_at="reference")
        go = hold(client, service, first)
        second = submit(client, trials=1)
        go()
        found = [until(client, each, *ENDS) for each in (first, second)]
    assert [each["state"] for each in found] == ["SUCCEEDED", "SUCCEEDED"]
    assert found[0]["ended_at"] <= found[1]["started_at"]


def test_a_task_reaches_nothing_of_another_owners_that_runs_beside_it(place, driver):
    """Neither her files nor her driver, which goes on after his was ended with all that ran as its user."""
    (place / "attack.py").write_text(ATTACK)
    script = 'import runpy, sys\nname = "attack" if "state" in open(sys.argv[-1]).read() else "service_driver"\n'
    (place / "both.py").write_text(f'{script}runpy.run_path(f"{place}/{{name}}.py")\n')
    state = place / "state"
    with by_owner(state, str(place / "both.py"), "ann", "bob", searches=2) as (submit_as, client, service):
        ann = submit_as("ann", trials=1, holds_at="reference")
        go = hold(client, service, ann)
        processes = {"the server's": os.getpid(), "others'": driver_of(service, ann)}
        bob = submit_as("bob", state=str(state), processes=processes, other=ann)
        assert until(client, bob, *ENDS)["state"] == "NOTHING_FITS"
        told = json.loads((service.places.search(bob).work / "told.json").read_text())
        assert {name for name, is_held in told["held"].items() if not is_held} == set()
        assert (len(told["held"]), told["ids"][0]) == (21, NUMBERS["t-bob"])
        assert alive(NUMBERS["t-bob"]) == []
        go()
        search = until(client, ann, *ENDS)
        assert (search["state"], search["attempt"]) == ("SUCCEEDED", 1)


def driver_of(service, search_id):
    with service.database.reading() as connection:
        return connection.scalar(select(SEARCHES.c.pid).where(SEARCHES.c.id == search_id))


def test_what_an_owner_without_a_user_submits_is_refused_and_nothing_is_lost(place, driver, users):
    """At submit and at resume, with what an admin does about it; a search whose owner's user has gone meanwhile says so
    in the end, and is resumed once there is one."""
    with by_owner(place / "state", driver, "ann", "eve", "dan", searches=1) as (submit_as, client, service):
        refused = submit_as("eve", trials=1)
        assert refused.status_code == 403
        assert "no such user" in refused.json()["detail"]
        assert "useradd --system t-eve" in refused.json()["detail"]
        assert client.get("/v1/searches").json() == []
        ann = submit_as("ann", trials=1, holds_at="reference")
        go = hold(client, service, ann)
        dan = submit_as("dan", trials=1)
        gone = users.pop("t-dan")
        go()
        search = until(client, dan, *ENDS)
        assert (search["state"], "useradd --system t-dan" in search["message"]) == ("ERROR", True)
        assert client.post(f"/v1/searches/{dan}/resume").status_code == 403
        users["t-dan"] = gone
        assert client.post(f"/v1/searches/{dan}/resume").status_code == 202
        assert until(client, dan, *ENDS)["state"] == "SUCCEEDED"


def test_of_an_earlier_servers_tasks_nothing_runs_on(place):
    """Who still has a search's folder is ended as the service starts; who is none of its users is left alone, whatever
    folder is theirs."""
    state = place / "state"
    running = {}
    for name in ("t-ann", "stranger"):
        folder = state / "searches" / name
        folder.mkdir(parents=True)
        user = Users(name).find("")
        user.give(folder)
        running[name] = subprocess.Popen(["sleep", "3600"], **user.process)
    Users("t-{owner}").let_pass(state)
    try:
        assert running["t-ann"].wait() == -signal.SIGKILL
        assert running["stranger"].poll() is None
    finally:
        running["stranger"].kill()
        running["stranger"].wait()
    assert {path.stat().st_uid for path in (state / "searches").iterdir()} == {0}


TRIES = f"""
import ctypes, json, os, pathlib
said = json.loads(pathlib.Path("said.json").read_text())
{ATTEMPTS}
told = dict(held=held, ids=[os.getuid(), os.getgid(), os.getgroups()])
pathlib.Path(f"told-{{os.getpid()}}.json").write_text(json.dumps(told))
"""
TASK = (HERE / "tasks" / "healthy.py").read_text()


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="no mounts of one's own: the interpreter may be where others may not pass")
def test_two_real_searches_of_two_owners_run_at_once_and_reach_nothing_of_each_others(place):
    """`serve --run-as 't-{owner}' --searches 2`, with users that the system has for it: both measure, take turns by
    trial, and come to a plan; each trial of Bob's task tries what it can do to the server and to Ann's."""
    state = place / "state"
    database, _ = open_database(state, None, alone=False)
    tokens = {name: Tokens(database).create(name, "submit", 3600.0)[1] for name in ("ann", "bob", "eve")}
    database.close()
    port = free_port()
    options = ("--run-as", "t-{owner}", "--searches", "2", "--executor", "local", "--port", str(port))
    command = [*passable(NUMBERS, place), sys.executable, "-m", "autotune", "serve", "--state", str(state), *options]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    with (place / "log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, cwd=place, stdout=log, stderr=log)
    with ExitStack() as stack:
        stack.callback(end, server)
        clients = {name: stack.enter_context(Client(f"http://127.0.0.1:{port}", tokens[name])) for name in tokens}
        wait_until(lambda: server.poll() is not None or answers(port), place)
        said = " ".join((place / "log").read_text().split())
        assert "Tasks run as t-OWNER, which has one search at a time." in said
        assert "There is no such user for eve" in said
        (place / "job").mkdir()
        (place / "job" / "model.py").write_text(TASK)
        spec = {"task": "model.py", "sampler": "random", "trial_time": "0.2s", "device": "cpu"}
        ann = clients["ann"].submit(place / "job", **spec)["id"]
        wait_until(lambda: [*clients["ann"].trials(ann)], place)
        (driver, *_) = with_variable(f"AUTOTUNE_SERVICE_SEARCH={ann}")
        processes = {"the server's": server.pid, "others'": driver.pid}
        job = {"state": str(state), "processes": processes, "other": ann}
        (place / "job" / "said.json").write_text(json.dumps(job))
        (place / "job" / "model.py").write_text(TASK + TRIES)
        bob = clients["bob"].submit(place / "job", **spec)["id"]
        known = len([*clients["ann"].trials(ann)])
        wait_until(lambda: [*clients["bob"].trials(bob)] and len([*clients["ann"].trials(ann)]) > known, place)
        searches = [clients["ann"].search(each) for each in (ann, bob)]
        assert [each["state"] for each in searches] == ["RUNNING", "RUNNING"], searches
        uids = {os.stat(f"/proc/{each.pid}").st_uid for each in with_variable(f"AUTOTUNE_SERVICE_SEARCH={bob}")}
        assert uids == {NUMBERS["t-bob"]}
        searches = [cancelled(clients["bob"], bob), cancelled(clients["ann"], ann)]
        assert [(each["state"], each["attempt"]) for each in searches] == [("SUCCEEDED", 1)] * 2, searches
        told = [json.loads(path.read_text()) for path in (state / "searches" / bob / "work").glob("told-*.json")]
        assert {name for each in told for name, is_held in each["held"].items() if not is_held} == set()
        assert {len(each["held"]) for each in told} == {21}
        assert {each["ids"][0] for each in told} == {NUMBERS["t-bob"]}
        server.terminate()
        assert server.wait() == 0


def end(server):
    server.terminate()
    server.wait()


def cancelled(client, search_id):
    """The search, once it has ended with the best so far."""
    client.cancel(search_id)
    return client.wait(search_id)


def answers(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
    except httpx.TransportError:
        return False


def wait_until(is_so, place, timeout_s=600.0):
    ends = time.monotonic() + timeout_s
    while not is_so():
        logs = "".join(path.read_text() for path in (place / "log", *place.glob("state/searches/*/driver.log")))
        assert time.monotonic() < ends, logs
        time.sleep(0.1)
