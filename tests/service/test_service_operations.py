"""What keeps a service: logs for machines, and limits for each token."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading

import pytest
import uvicorn
from command_line import environment

from autotune.commands.service.serve import log_to_stderr
from autotune.errors import UserError
from autotune.service.driver import PROGRAM, Driver, SearchFolder
from autotune.service.problems import Problem
from autotune.service.service import open_database
from autotune.service.spec import SearchSpec
from autotune.service.store.database import Database
from autotune.service.store.tokens import expiry_s
from autotune.service.supervisor import RunnerOptions
from autotune.service.turns import SearchTurns
from autotune.service.web import limits
from autotune.service.web.limits import BoundedProtocol


def test_a_token_may_ask_so_often(monkeypatch):
    """10 a second: 20 at once, then one for each tenth of a second; another token has its own."""
    clock = [100.0]
    monkeypatch.setattr(limits.time, "monotonic", lambda: clock[0])
    limit = limits.RequestLimit(10.0)
    for _ in range(20):
        limit.take("ann")
    with pytest.raises(Problem, match="10 times a second") as refused:
        limit.take("ann")
    assert (refused.value.status, refused.value.more) == (429, {"retry_after": 1})
    limit.take("bob")
    clock[0] += 0.11
    limit.take("ann")


def test_a_head_has_an_end():
    """Headers, one header, trailers and chunk extensions that go on: the connection ends. A body, even byte by byte,
    may be longer."""
    taken = []

    async def app(scope, receive, send):
        if scope["type"] == "http":
            while (message := await receive()).get("more_body"):
                pass
            taken.append(message["type"])
            await send({"type": "http.response.start", "status": 204})
            await send({"type": "http.response.body"})

    server = uvicorn.Server(uvicorn.Config(app, port=0, http=BoundedProtocol, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
        port = server.servers[0].sockets[0].getsockname()[1]
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        endless = {
            "headers": (head, b"X: y\r\n"),
            "one header": (head + b"X: ", b"y" * 100),
            "trailers": (head + b"\r\n0\r\n", b"X: y\r\n"),
            "a chunk's extension": (head + b"\r\n1;", b"y" * 100),
        }
        for what, (first, then) in endless.items():
            assert not answered(port, first, then * (2**22 // len(then)), b"\r\n\r\n"), what
        assert taken.count("http.request") == 0
        body = b"1\r\nx\r\n" * 2**16
        assert answered(port, head + b"\r\n", body, b"0\r\n\r\n") == b"HTTP/1.1 204"
    finally:
        server.should_exit = True
        thread.join()


def answered(port, *parts):
    """The beginning of a good answer; empty where there is none."""
    with socket.create_connection(("127.0.0.1", port), timeout=600) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            said = connection.recv(12)
        except ConnectionError:
            return b""
    return b"" if said.endswith(b"400") else said


def test_a_line_of_the_log_is_an_object(capsys, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    log_to_stderr("json")
    logging.getLogger("autotune.service").info("search %s: \n%s", "a", "b")
    row = json.loads(capsys.readouterr().err)
    assert (row["level"], row["message"]) == ("INFO", "search a: \nb")


def test_a_file_of_the_job_is_never_run_in_place_of_its_driver(tmp_path):
    """`autotune.py` in the folder that the driver is started in: what people call their own helper."""
    (tmp_path / "autotune.py").write_text("raise SystemExit('the job')")
    ended = subprocess.run([*PROGRAM, "--version"], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_driver_has_no_secret_but_those_that_are_passed(tmp_path, monkeypatch):
    """What a started driver has of the server's environment: what decides how a job runs, and what is asked for."""
    given = {"HF_HOME": "/h", "RAY_AUTH_TOKEN": "r", "CUDA_VISIBLE_DEVICES": "0", "HF_TOKEN": "f", "WANDB_API_KEY": "w"}
    secret = {"AUTOTUNE_DATABASE": "d", "AUTOTUNE_TOKEN": "t", "AWS_SECRET_ACCESS_KEY": "a", "NVIDIA_API_KEY": "n"}
    for name, value in (given | secret).items():
        monkeypatch.setenv(name, value)
    folder, tell = SearchFolder(tmp_path), "import json, os; print(json.dumps(dict(os.environ)))"
    folder.work.mkdir()
    options = RunnerOptions(program=(sys.executable, "-c", tell), pass_env=("HF_TOKEN", "WANDB_API_KEY"))
    driver = Driver("s", SearchSpec(task="model.py", archive="0" * 64), folder, 1, options, SearchTurns())
    assert driver.process.wait() == 0
    had = json.loads(folder.result.read_text())
    assert {name: had.get(name) for name in given} == given
    assert not secret.keys() & had.keys()


def test_what_a_task_writes_into_its_drivers_progress_is_no_event(tmp_path):
    """No event of the service's own, none of another form, and no number that JSON does not have."""
    folder = SearchFolder(tmp_path)
    good = {"event": "trial_ended", "number": 1, "outcome": "measured", "samples_per_s": None}
    bad = (
        {"event": "state", "state": "SUCCEEDED"},
        {"event": "end"},
        {"event": "a\nid: 9"},
        {"event": "trial_ended", "number": 2**40, "outcome": "measured"},
        {"event": "trial_ended", "number": 2, "outcome": "\0"},
        {"event": "search_started", "resumed": [{"number": -1}]},
        ["event"],
    )
    lines = [*map(json.dumps, bad), json.dumps(good).replace("null", "NaN"), "[" * 100_000, "half"]
    folder.progress(1).write_text("\n".join(lines))
    rows, offset = folder.read_progress(1, 0)
    assert (rows, offset) == ([good], folder.progress(1).stat().st_size - len("half"))


def test_a_line_of_progress_may_be_long(tmp_path):
    """10,000 trials of an earlier driver stand in one line, of some 5 MB."""
    folder = SearchFolder(tmp_path)
    row = {"event": "search_started", "resumed": [{"number": n, "words": "x" * 500} for n in range(10_000)]}
    folder.progress(1).write_text(json.dumps(row) + "\n")
    assert folder.read_progress(1, 0) == ([row], folder.progress(1).stat().st_size)


def test_what_a_driver_says_can_be_stored_anywhere(tmp_path):
    """PostgreSQL takes no null character, and no database half a pair of surrogates."""
    folder = SearchFolder(tmp_path)
    folder.result.write_text(json.dumps({"error": "a\0b\ud800", "kind": "TaskError"}))
    folder.log.write_bytes(b"c\0d\xff")
    assert folder.read_error() == (r"a\0b?", "TaskError")
    assert folder.read_log() == "c\\0d\N{REPLACEMENT CHARACTER}"


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path):
    (tmp_path / "service.db").write_bytes(b"a letter" * 512)
    with pytest.raises(UserError, match=r"--database: .*file is not a database"):
        open_database(tmp_path, None)
    assert (tmp_path / "service.db").read_bytes() == b"a letter" * 512


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o702])
def test_a_state_folder_that_others_may_use_is_refused_with_what_mends_it(tmp_path, mode):
    """Archives and the database are in it. The command that the message ends with does."""
    state = tmp_path / "our state"
    state.mkdir()
    state.chmod(mode)
    with pytest.raises(UserError, match=f"its mode is {mode:o}") as refused:
        open_database(state, None)
    assert [*state.iterdir()] == []
    subprocess.run(["sh", "-c", str(refused.value).rpartition("Close it: ")[2]], check=True)
    database, locks = open_database(state, None)
    database.close()
    assert (state / "service.db").is_file()
    for each in locks:
        each.release()


def test_a_databases_password_is_told_to_nobody():
    """Not even where an @ in it, which ought to be %40, makes its end a part of the host's name."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'psycopg[binary]'")
    with pytest.raises(UserError, match="cannot be reached") as refused:
        Database("postgresql+psycopg://ann:first@second@127.0.0.1:9/name").migrate()
    assert not any(each in str(refused.value) for each in ("first", "second"))


@pytest.mark.parametrize(("text", "seconds"), [("30d", 30 * 86400.0), ("1.5h", 5400.0), ("never", None)])
def test_a_token_expires_after_a_time(text, seconds):
    assert expiry_s(text) == seconds


@pytest.mark.parametrize("text", ["-5d", "0d", "d", "nand", "soon"])
def test_a_token_expires_after_no_other_time(text):
    with pytest.raises(Problem, match="30d, 12h or never was expected"):
        expiry_s(text)
