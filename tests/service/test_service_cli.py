"""The service's words on the command line, against a server of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import httpx
import pytest
import yaml
from command_line import PROGRAM, environment
from service_runs import OPTIONS, listening

from autotune.service.client import Client
from autotune.service.service import open_service
from autotune.service.web.app import make_app


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A server on a port of its own, in a thread; the token of its run is in the environment."""
    options = replace(OPTIONS, pauses_s=(600.0, 600.0))
    folder = tmp_path_factory.mktemp("cli")
    (folder / "shared").mkdir()
    service = open_service(folder / "state", None, options, shared=(folder / "shared",))
    with listening(make_app(service)) as port, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOTUNE_TOKEN", service.tokens.make_for_run())
        yield f"http://127.0.0.1:{port}"


@pytest.mark.medium
def test_submit_status_logs_fetch(here, url, tmp_path):
    """From a folder to its plan."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "model.py").write_text('{"trials": 2}')
    ended = here("submit", "job/model.py", "--budget", "1GiB", "--wait", "--server", url, "--json", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    search = json.loads(ended.stdout)
    assert (search["state"], search["spec"]["budget"]) == ("SUCCEEDED", "1 GiB")
    assert "trial ended, trial 1: 101 samples/s" in ended.stderr
    assert search["id"] in here("status", "--server", url, cwd=tmp_path).stdout
    assert "the driver speaks" in here("logs", search["id"], "--server", url, cwd=tmp_path).stdout
    assert here("fetch", search["id"], "-o", "mine.yaml", "--server", url, cwd=tmp_path).stdout == "mine.yaml\n"
    assert (tmp_path / "mine.yaml").read_text() == "schema: autotune/plan@1\nsettings: {}\n"


def test_status_shows_those_that_are_like_what_is_asked(here, url, tmp_path):
    """By state in any case, owner and a part of the name, as the page does; of one search that makes no sense."""
    (tmp_path / "model.py").write_text('{"trials": 1}')
    found = {}
    for name in ("apples", "pears"):
        ended = here("submit", "model.py", "--name", name, "--wait", "--server", url, "--json", cwd=tmp_path)
        found[name] = json.loads(ended.stdout)["id"]

    def shown(*like):
        return here("status", *like, "--server", url, cwd=tmp_path)

    own = ("--owner", "(local)", "--state", "succeeded")
    assert shown("--name", "pple", *own).stdout.split()[0] == found["apples"]
    assert {line.split()[0] for line in shown(*own).stdout.splitlines()} >= {*found.values()}
    for like in (("--owner", "nobody"), ("--state", "queued", "--state", "error", "--name", "pple")):
        assert (shown(*like).stdout, "No search is like that." in shown(*like).stderr) == ("", True)
    refused = shown(found["pears"], "--owner", "ann")
    assert (refused.returncode, "leave out --owner" in refused.stderr) == (2, True)


def test_a_failed_search_leaves_with_its_code_and_words(here, url, tmp_path):
    (tmp_path / "model.py").write_text('{"error": "nothing fits into 1 GiB", "exit_code": 3}')
    ended = here("submit", "model.py", "--wait", "--server", url, cwd=tmp_path)
    assert (ended.returncode, "nothing fits into 1 GiB" in ended.stdout) == (3, True)


def test_status_says_when_a_search_that_failed_is_tried_again(here, url, tmp_path):
    (tmp_path / "model.py").write_text('{"error": "the cluster has gone.", "kind": "TrialsLost"}')
    with Client(url, os.environ["AUTOTUNE_TOKEN"]) as client:
        search_id = client.submit(tmp_path, task="model.py")["id"]
        while (at := client.search(search_id)["retry_at"]) is None:
            time.sleep(0.02)
        said = here("status", search_id, "--server", url, cwd=tmp_path).stdout
        client.cancel(search_id, "now")
    assert said.startswith(f"{search_id}  QUEUED")
    assert said.endswith(f"the cluster has gone.  tried again at {time.strftime('%H:%M:%S', time.localtime(at))}\n")


def test_a_cancelled_search_goes_on_and_one_that_waits_has_another_priority(here, url, tmp_path):
    (tmp_path / "model.py").write_text('{"error": "the cluster has gone.", "kind": "TrialsLost"}')
    with Client(url, os.environ["AUTOTUNE_TOKEN"]) as client:
        search_id = client.submit(tmp_path, task="model.py")["id"]
        while client.search(search_id)["retry_at"] is None:
            time.sleep(0.02)
        changed = here("prioritize", search_id, "80", "--server", url, "--json", cwd=tmp_path)
        assert json.loads(changed.stdout)["priority"] == 80
        refused = here("resume", "0" * 16, "--server", url, cwd=tmp_path)
        assert (refused.returncode, refused.stderr) == (2, f"there is no search '{'0' * 16}'.\n")
        here("cancel", search_id, "--now", "--server", url, cwd=tmp_path)
        assert client.wait(search_id)["state"] == "CANCELLED"
        resumed = here("resume", search_id, "--server", url, cwd=tmp_path).stdout.split()
        assert resumed[:2] in ([search_id, "QUEUED"], [search_id, "LEASED"])  # or a server has taken it by then
        client.cancel(search_id, "now")
    assert here("prioritize", search_id, "101", "--server", url, cwd=tmp_path).returncode == 2


@pytest.mark.medium
def test_a_folder_that_the_service_sees_is_not_sent(here, url, tmp_path, tmp_path_factory):
    """The task by its path there, or within; not beside a folder that is sent, and not a script."""
    shared = next(tmp_path_factory.getbasetemp().glob("cli*/shared"))
    (shared / "model.py").write_text('{"trials": 1}')
    for task in ("model.py", f"{shared}/model.py"):
        ended = here("submit", task, "--shared", str(shared), "--wait", "--json", "--server", url, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        search = json.loads(ended.stdout)
        assert (search["state"], search["spec"]["archive"], search["spec"]["task"]) == ("SUCCEEDED", None, "model.py")
    ended = here("submit", "model.py", "--shared", str(tmp_path), "--server", url, cwd=tmp_path)
    assert (ended.returncode, f"a path in a shared folder was expected ({shared})" in ended.stderr) == (2, True)
    for more in (("model.py", "--folder", "."), ("--", "python", "train.py")):
        ended = here("submit", "--shared", str(shared), "--server", url, *more, cwd=tmp_path)
        assert (ended.returncode, "--shared: no" in ended.stderr) == (2, True)


def test_what_is_not_there_is_said(here, url, tmp_path):
    ended = here("fetch", "0" * 16, "--server", url, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (2, f"there is no search '{'0' * 16}'.\n")
    ended = here("submit", "model.py", "--server", url, cwd=tmp_path)
    assert (ended.returncode, "no such file" in ended.stderr) == (2, True)


@pytest.mark.medium
def test_a_server_without_tokens_prints_one_and_ends_well_when_it_is_told_to(tmp_path):
    """An admin's, in a link to the page and for the commands; nobody is let in without. SIGTERM: exit code 0, as what
    keeps services running expects."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    command = [*PROGRAM, "serve", "--executor", "local", "--port", url.rpartition(":")[2]]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True) as server:
        said = ""
        for line in server.stderr:
            said += line
            if "running on" in line:
                (token,) = re.findall(r"AUTOTUNE_TOKEN=(\S+)", said)
                assert f"{url}/#token={token}" in said
                assert "Tasks run as its own user" in said
                assert httpx.get(f"{url}/v1/tokens").status_code == 401
                with Client(url, token) as client:
                    assert [*client.searches()] == []
                server.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    assert not any(token.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


TOKEN = ("serve", "token", "create", "--role", "read")


def test_a_state_folder_means_the_same_before_and_after_a_subcommand(here, tmp_path):
    """And a database: what was said the nearest counts; its environment variable is that of all."""
    (tmp_path / "here").mkdir(mode=0o700)
    made = here("serve", "--state", "there", *TOKEN[1:], "--name", "ann", cwd=tmp_path)
    assert (made.returncode, f"no service in {tmp_path}/there" in made.stderr) == (0, True)
    again = here("serve", "--state", "here", *TOKEN[1:], "--name", "bob", "--state", "there", cwd=tmp_path)
    assert (again.returncode, "no service" in again.stderr) == (0, False)
    url = f"sqlite:///{tmp_path}/there/service.db"
    places = (("--state", "there"), ("--database", url), ("--state", "none", "--database", url))
    lines = [here("serve", *place, "token", "list", cwd=tmp_path) for place in places]
    lines += [here("serve", "token", "list", *place, cwd=tmp_path) for place in places]
    lines += [here("serve", "token", "list", cwd=tmp_path, AUTOTUNE_DATABASE=url)]
    lines += [here("serve", "--database", url, "token", "list", cwd=tmp_path, AUTOTUNE_DATABASE="sqlite:////none.db")]
    assert {each.stdout for each in lines} == {lines[0].stdout}, [each.stderr for each in lines]
    assert ["ann" in lines[0].stdout, "bob" in lines[0].stdout] == [True, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "there"]
    assert [*(tmp_path / "here").iterdir()] == []


@pytest.mark.parametrize("words", [TOKEN, ("serve", "token", "list"), ("serve", "token", "revoke", "5e0d11c2")])
def test_where_no_service_is_no_token_is_made(here, tmp_path, words):
    """A token of a new service that nobody has asked for would be known to nothing."""
    ended = here(*words, *(("--name", "ann") if words == TOKEN else ()), cwd=tmp_path)
    assert (ended.returncode, ended.stdout, [*tmp_path.iterdir()]) == (2, "", [])
    assert ended.stderr.startswith(f"{tmp_path}/autotune-service: there is no service.")


def test_tokens_are_made_listed_and_revoked(here, tmp_path):
    made = here(*TOKEN, "--name", "ann", "--state", "autotune-service", "--json", cwd=tmp_path)
    token = json.loads(made.stdout)
    again = here("serve", "token", "create", "--role", "admin", "--name", "ann", cwd=tmp_path)
    assert (again.returncode, again.stderr.startswith(f"--name: token {token['id']} is ann's")) == (2, True)
    listed = here("serve", "token", "list", cwd=tmp_path).stdout
    assert (token["token"].startswith("atn_"), "ann" in listed, token["token"] in listed) == (True, True, False)
    assert here("serve", "token", "revoke", token["id"], cwd=tmp_path).returncode == 0
    assert "revoked" in here("serve", "token", "list", cwd=tmp_path).stdout
    unnamed = here("serve", "token", "create", "--role", "read", cwd=tmp_path)
    assert (unnamed.returncode, "--name" in unnamed.stderr) == (2, True)
    assert (
        here(
            "serve", "token", "create", "--role", "read", "--name", "bob", "--expires", "soon", cwd=tmp_path
        ).returncode
        == 2
    )


def test_a_variable_that_is_to_be_passed_must_be_there(here, tmp_path):
    ended = here("serve", "--pass-env", "HF_NONE", "--state", "state", "--executor", "local", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (
        2,
        "--pass-env HF_NONE: it is not set here. Set it, or leave the option out.\n",
    )


def test_a_certificate_that_cannot_be_read_is_the_users_error(here, tmp_path):
    """Missing, and no certificate."""
    (tmp_path / "text.pem").write_text("none")
    for name in ("none.pem", "text.pem"):
        arguments = ("--tls-certificate", name, "--tls-key", name, "--state", "state", "--executor", "local")
        ended = here("serve", *arguments, cwd=tmp_path)
        assert ended.returncode == 2, ended.stderr
        assert f"--tls-certificate {name}, --tls-key {name}: they cannot be used" in ended.stderr
        assert "serves" not in ended.stderr


@pytest.mark.parametrize("name", ["", "a\x1b[2J", "a" * 101])
def test_a_token_needs_a_name_that_can_be_listed(here, tmp_path, name):
    """As over HTTP."""
    ended = here(*TOKEN, "--state", "state", "--name", name, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("--name: 1 to 100 letters")
    assert "\x1b" not in ended.stderr


def test_a_shared_folder_that_is_none_is_refused(here, tmp_path):
    ended = here("serve", "--shared", "none", "--state", "state", "--executor", "local", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (
        2,
        "--shared none: a folder was expected. Make it first, or name another.\n",
    )


@pytest.mark.parametrize("server", ["ftp://host", "localhost:8470", "http://"])
def test_a_server_has_an_http_url(here, tmp_path, server):
    """Each is no URL that a request can be made to."""
    ended = here("status", "--server", server, cwd=tmp_path)
    assert ended.returncode == 2
    assert "--server: a URL such as http://127.0.0.1:8470 was expected, but got" in ended.stderr


JOBS = f"""
jobs:
  - {{name: first, command: {sys.executable} fits.py, budget: 8GiB, priority: 3, max_time: 20m, device: cpu}}
  - {{name: second, command: {sys.executable} none.py, budget: 90%}}
"""


@pytest.fixture
def jobs(tmp_path):
    (tmp_path / "fits.py").write_text('{"trials": 2}')
    (tmp_path / "none.py").write_text('{"error": "nothing fits into 1 GiB", "exit_code": 3}')
    (tmp_path / "jobs.yaml").write_text(JOBS)
    return tmp_path


def test_a_list_of_jobs_becomes_searches_once(here, url, jobs):
    """With the jobs' own words; submitted again, and with one job more, none is made twice: not even after their plans
    were fetched."""
    submitted = here("batch", "jobs.yaml", "--server", url, "--json", cwd=jobs)
    assert submitted.returncode == 0, submitted.stderr
    searches = json.loads(submitted.stdout)["searches"]
    said = {"budget": "8 GiB", "max_time": "1200s", "priority": 75, "device": "cpu", "trials": 24}
    assert searches[0]["spec"] | said | {"command": [sys.executable, "fits.py"]} == searches[0]["spec"]
    assert (searches[1]["spec"]["budget"], searches[1]["priority"]) == ("90%", 50)

    waited = here("batch", "jobs.yaml", "--server", url, "--wait", cwd=jobs)
    assert (waited.returncode, waited.stdout) == (3, "plans/summary.yaml\n")
    assert "second: nothing fits into 1 GiB" in waited.stderr
    assert (jobs / "plans" / "first.yaml").read_text() == "schema: autotune/plan@1\nsettings: {}\n"
    rows = yaml.safe_load((jobs / "plans" / "summary.yaml").read_text())["jobs"]
    assert [row["state"] for row in rows] == ["done", "nothing fits"]

    (jobs / "jobs.yaml").write_text(f"{JOBS}  - {{name: third, command: {sys.executable} fits.py}}\n")
    again = json.loads(here("batch", "jobs.yaml", "--server", url, "--json", cwd=jobs).stdout)["searches"]
    ids = [search["id"] for search in searches]
    assert ids == [row["search"] for row in rows] == [search["id"] for search in again[:2]]
    assert again[2]["id"] not in ids


@pytest.mark.medium
def test_what_a_job_list_asks_of_no_service_is_refused_before_anything_is_submitted(here, url, jobs):
    (jobs.parent / "outside.yaml").write_text("schema: autotune/space@1\nprecision: auto\n")
    more = f"  - {{name: third, command: {sys.executable} fits.py, trials: 20000}}\n"
    more += f"  - {{name: fourth, command: {sys.executable} fits.py, space: ../outside.yaml}}\n"
    (jobs / "jobs.yaml").write_text(JOBS.replace("8GiB", "7GiB") + more)
    before = here("status", "--server", url, cwd=jobs).stdout.splitlines()
    ended = here("batch", "jobs.yaml", "--server", url, cwd=jobs)
    assert ended.returncode == 2
    assert "jobs.yaml: jobs.2 (third): trials: at most 10000 were expected, but got 20000" in ended.stderr
    assert "jobs.yaml: jobs.3 (fourth): ../outside.yaml: a file in " in ended.stderr
    assert len(here("status", "--server", url, cwd=jobs).stdout.splitlines()) == len(before)


@pytest.mark.medium
def test_a_list_is_gone_on_with(here, url, jobs):
    """--resume queues what has failed again, and leaves alone what has a plan."""
    (jobs / "none.py").write_text('{"error": "no such data"}')
    arguments = ("batch", "jobs.yaml", "--server", url, "--wait", "--json")
    ended = here(*arguments, cwd=jobs)
    assert (ended.returncode, [row["state"] for row in json.loads(ended.stdout)["jobs"]]) == (2, ["done", "failed"])
    ids = [row["search"] for row in json.loads(here(*arguments, "--resume", cwd=jobs).stdout)["jobs"]]
    with Client(url, os.environ["AUTOTUNE_TOKEN"]) as client:
        assert [client.search(each)["attempt"] for each in ids] == [1, 2]


@pytest.mark.parametrize(
    "options", [("--wait",), ("--server", "http://h", "--dry-run"), ("--server", "http://h", "-v")]
)
def test_a_batch_runs_here_or_there(here, jobs, options):
    """What belongs to the other place is refused."""
    ended = here("batch", "jobs.yaml", *options, cwd=jobs)
    assert ended.returncode == 2
    assert "--server" in ended.stderr
