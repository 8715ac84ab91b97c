"""Leases: who is late writes nothing; races have one winner; a server that was killed loses nothing."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra `service` is not installed")

from service_runs import DRIVER
from sqlalchemy import update

from autotune.errors import UserError
from autotune.service.archives import pack
from autotune.service.client import Client, ServiceError
from autotune.service.documents import Documents
from autotune.service.spec import SearchSpec
from autotune.service.store.database import Database, now
from autotune.service.store.leases import Leases, Stale
from autotune.service.store.searches import Searches
from autotune.service.store.states import ENDS as END_STATES
from autotune.service.store.states import NEXT, OPEN, TERMINAL, State
from autotune.service.store.tables import METADATA, SEARCHES
from autotune.workers.process import with_variable

SPEC = SearchSpec(task="model.py", folder="/jobs")


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request, tmp_path):
    own = f"sqlite:///{tmp_path}/service.db"
    database = Database(own if request.param == "sqlite" else request.getfixturevalue("postgresql"))
    database.migrate()
    yield database
    database.close()


@pytest.fixture(scope="session")
def postgresql():
    """A cluster of its own, on a socket; as the user postgres where this is root."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'autotune[postgresql]'")
    initdb = next((str(path) for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")), None)
    if initdb is None:
        pytest.skip("PostgreSQL's server is not installed")
    folder = Path(tempfile.mkdtemp(prefix="autotune-pg-"))  # a socket has a short path, and a user of its own reads it
    user: list[str] = []
    if os.geteuid() == 0:
        user = ["runuser", "-u", "postgres", "--"]
        if subprocess.run([*user, "true"], capture_output=True).returncode:
            pytest.skip("there is no user postgres, and PostgreSQL refuses to run as root")
        subprocess.run(["chown", "postgres", folder], check=True)
    data, ctl = folder / "data", initdb.replace("initdb", "pg_ctl")
    made = subprocess.run(
        [*user, initdb, "-D", data, "-A", "trust", "-U", "tuner", "--no-sync"], capture_output=True, cwd="/"
    )
    if made.returncode:
        pytest.skip(f"initdb failed: {made.stderr.decode()[-200:]}")
    flags = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
    subprocess.run(
        [*user, ctl, "-D", data, "-o", flags, "-l", folder / "log", "-w", "start"],
        check=True,
        cwd="/",
        capture_output=True,
    )
    yield f"postgresql+psycopg://tuner@/postgres?host={folder}"
    subprocess.run([*user, ctl, "-D", data, "-m", "immediate", "-w", "stop"], cwd="/", capture_output=True)
    shutil.rmtree(folder)


def queued(database, count=1):
    return [Searches(database).submit(SPEC, "ann", None)[0].id for _ in range(count)]


def test_the_table_of_states_is_whole():
    """Every state is in it, a result has no way out, and what a server holds may come to any end."""
    assert NEXT.keys() == set(State) == OPEN | TERMINAL
    assert [state for state in State if not NEXT[state]] == [State.SUCCEEDED, State.NOTHING_FITS]
    assert all(NEXT[state] >= END_STATES for state in (State.LEASED, State.RUNNING, State.CANCELLING))


def test_the_migrations_make_the_tables(database):
    """As tables.py has them: autogenerate finds nothing to do."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    with database.reading() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
    database.migrate()  # again changes nothing


def test_a_newer_schema_is_refused_and_left_alone(database):
    with database.writing() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(UserError, match="9999, which a newer autotune wrote"):
        database.migrate()
    with database.writing() as connection:
        connection.exec_driver_sql("DROP TABLE alembic_version")
        METADATA.drop_all(connection)
    database.migrate()


def test_a_late_result_is_dropped(database):
    """The lease passed to somebody else: nothing of the first's is written, whatever it is."""
    (search_id,) = queued(database)
    first, second = Leases(database, "home", 30.0), Leases(database, "home", 30.0)
    old = first.claim()
    assert old.search_id == search_id
    assert second.claim() is None
    first.begin(old, 1, 1)
    with database.writing() as connection:
        connection.execute(update(SEARCHES).where(SEARCHES.c.id == search_id).values(lease_expires_at=now() - 1))
    (expired,) = second.expired()
    second.give_back(expired, "its server was lost", is_failure=False)
    new = second.claim()
    assert (new.search_id, new.attempt, new.token != old.token) == (search_id, 2, True)
    before = Searches(database).get(search_id)
    row = {"event": "trial_ended", "number": 0, "outcome": "measured"}
    for late in (
        lambda: first.keep(old),
        lambda: first.begin(old, 1, 1),
        lambda: first.record(old, [row], 10, {"num_ended": 1}),
        lambda: first.finish(old, State.SUCCEEDED, "", Documents("a plan")),
        lambda: first.give_back(old, "lost", is_failure=True),
    ):
        with pytest.raises(Stale):
            late()
    assert Searches(database).get(search_id) == before
    assert Searches(database).trials(search_id) == []
    second.finish(new, State.SUCCEEDED, "", Documents("the plan"))
    assert Searches(database).document(search_id, "plan") == "the plan"


def test_one_of_many_that_claim_at_once_has_it(database):
    """40 searches, 8 that claim behind a barrier, until none is left: each is had once."""
    wanted = queued(database, 40)
    barrier, claimed = threading.Barrier(8), []

    def claim():
        leases = Leases(database, "home", 30.0)
        barrier.wait()
        while lease := leases.claim():
            claimed.append(lease.search_id)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == sorted(wanted)


def test_the_highest_priority_is_next_then_the_oldest(tmp_path):
    database = Database(f"sqlite:///{tmp_path}/service.db")
    database.migrate()
    first, second, third = queued(database, 3)
    Searches(database).set_priority(third, 90)
    leases = Leases(database, "home", 30.0)
    assert [leases.claim().search_id for _ in range(3)] == [third, first, second]
    database.close()


def test_owners_take_turns_within_a_priority(database):
    """Flo has queued four before two of Gus, and one of Eve is more urgent: Eve, then Flo and Gus in turn."""
    searches = Searches(database)
    names = {searches.submit(SPEC, owner, None)[0].id: owner for owner in ("flo",) * 4 + ("gus",) * 2 + ("eve",)}
    searches.set_priority([*names][-1], 90)
    leases, order = Leases(database, "home", 30.0), []
    while lease := leases.claim():
        order.append(names[lease.search_id])
        leases.begin(lease, 1, 1)
        leases.finish(lease, State.ERROR, "")
    assert order == ["eve", "flo", "gus", "flo", "gus", "flo", "flo"]


def test_a_search_goes_on_where_its_files_are(tmp_path):
    """A server with another state folder leaves it alone."""
    database = Database(f"sqlite:///{tmp_path}/service.db")
    database.migrate()
    queued(database)
    here, elsewhere = Leases(database, "here", -1.0), Leases(database, "elsewhere", -1.0)
    lease = here.claim()
    assert (elsewhere.expired(), [each.token for each in here.expired()]) == ([], [lease.token])
    here.give_back(lease, "", is_failure=False)
    assert elsewhere.claim() is None
    assert here.claim() is not None
    database.close()


def test_drivers_that_die_one_after_the_other_end_in_an_error(tmp_path):
    """At the third; a trial between them begins the count anew."""
    database = Database(f"sqlite:///{tmp_path}/service.db")
    database.migrate()
    (search_id,) = queued(database)
    leases = Leases(database, "home", 30.0)
    row = {"event": "trial_ended", "number": 0, "outcome": "measured"}
    for dies in range(4):
        lease = leases.claim()
        if dies == 0:
            leases.record(lease, [row], 1, {})
        leases.give_back(lease, "signal 9.", is_failure=True)
        state = Searches(database).get(search_id).state
        if state is State.ERROR:
            break
    assert (dies, state) == (2, State.ERROR)
    database.close()


class Server:
    """``autotune serve`` in a process of its own, with the driver that takes no time."""

    def __init__(self, state: Path) -> None:
        self.log = state.parent / "server.log"
        code = (
            "import sys, uvicorn\n"
            "from autotune.service.web.app import make_app\n"
            "from autotune.service.runner import RunnerOptions\n"
            "from autotune.service.service import open_service\n"
            "from pathlib import Path\n"
            f"options = RunnerOptions(num_searches=2, lease_s=5.0, beat_s=0.05, program={DRIVER!r})\n"
            f"service = open_service(Path({str(state)!r}), None, options, on_loopback=True)\n"
            "import socket\n"
            "listening = socket.create_server(('127.0.0.1', 0))\n"
            "print(listening.getsockname()[1], flush=True)\n"
            "uvicorn.Server(uvicorn.Config(make_app(service), log_level='error')).run([listening])\n"
        )
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=log, text=True)
        port = self.process.stdout.readline().strip()
        assert port, self.log.read_text()
        self.client = Client(f"http://127.0.0.1:{port}")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


def test_a_killed_server_and_its_orphaned_driver_lose_nothing(tmp_path):
    """SIGKILL of the server: the driver lives on; the next server ends it, reads what it said, and goes on."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "model.py").write_text('{"trials": 30, "seconds": 0.1}')
    server = Server(tmp_path / "state")
    try:
        search_id = server.client.submit(folder, task="model.py")["id"]
        while not list(server.client.trials(search_id)):
            time.sleep(0.05)
        server.kill()
        mark = f"AUTOTUNE_SERVICE_SEARCH={search_id}"
        assert with_variable(mark)
        server = Server(tmp_path / "state")
        search = server.client.wait(search_id)
        assert (search["state"], search["attempt"]) == ("SUCCEEDED", 2)
        proof = (tmp_path / "state" / "searches" / search_id / "proof").read_text().split()
        assert (len(proof), len(set(proof))) in ((30, 30), (31, 30))  # what was in flight may have been measured
        assert [trial["number"] for trial in server.client.trials(search_id)] == [*range(30)]
        assert [event["seq"] for event in server.client.events(search_id)] == [*range(1, search["num_events"] + 1)]
        assert with_variable(mark) == []
    finally:
        server.kill()


def test_the_client_asks_again_and_says_why_not(monkeypatch):
    monkeypatch.setattr("autotune.service.client.time.sleep", lambda seconds: None)
    with Client("http://127.0.0.1:9") as client, pytest.raises(ServiceError, match="cannot be reached") as refused:
        client.search("0" * 16)
    assert (refused.value.status, refused.value.exit_code) == (0, 2)


def test_a_folder_packs_to_the_same_bytes_whenever(tmp_path):
    """Its hash is its name; caches, version control and links that lead out are left out."""
    for name in ("model.py", "data/x.bin", ".git/config", "__pycache__/m.pyc", ".autotune/s.db"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "out").symlink_to("/etc/hostname")
    first = pack(tmp_path)
    os.utime(tmp_path / "model.py", (1, 1))
    assert pack(tmp_path) == first
    with tarfile.open(fileobj=io.BytesIO(first)) as tar:
        assert tar.getnames() == ["data/x.bin", "model.py"]
