"""Leases: who is late writes nothing; races have one winner; a server that was killed loses nothing."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
from fastapi.testclient import TestClient
from postgresql import Cluster, missing
from service_runs import LOCAL, OPTIONS, archive, bearer, serving, spec, submit, until
from sqlalchemy import inspect, update

from autotune.errors import UserError
from autotune.service.archives import pack
from autotune.service.client import Client, ServiceError
from autotune.service.findings import Documents
from autotune.service.runner import Runner
from autotune.service.service import forget_old
from autotune.service.spec import SearchSpec
from autotune.service.store.database import Database, now
from autotune.service.store.leases import Leases, Stale
from autotune.service.store.searches import Searches
from autotune.service.store.states import ENDS as END_STATES
from autotune.service.store.states import NEXT, OPEN, TERMINAL, State
from autotune.service.store.tables import METADATA, SEARCHES
from autotune.service.supervisor import Places, RunnerOptions
from autotune.service.web.app import make_app
from benchmarks.service_faults.races import race

SPEC = SearchSpec(task="model.py", folder="/jobs")


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request, tmp_path):
    own = f"sqlite:///{tmp_path}/service.db"
    if request.param == "postgresql":
        name = "".join(each for each in request.node.name if each.isalnum()).lower()[-50:]
        own = request.getfixturevalue("postgresql").create(f"t{name}")
    database = Database(own)
    database.migrate()
    yield database
    database.close()


@pytest.fixture(scope="session")
def postgresql():
    """A server of its own, on a socket; each test has a database of its own there."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'psycopg[binary]'")
    if reason := missing():
        pytest.skip(reason)
    with Cluster() as cluster:
        yield cluster


def queued(database, count=1):
    return [Searches(database).submit(SPEC, "ann", None)[0].id for _ in range(count)]


def test_the_table_of_states_is_whole():
    """Every state is in it, a result has no way out, and what a server holds may come to any end."""
    assert NEXT.keys() == set(State) == OPEN | TERMINAL
    assert [state for state in State if not NEXT[state]] == [State.SUCCEEDED, State.NOTHING_FITS]
    assert all(NEXT[state] >= END_STATES for state in (State.LEASED, State.RUNNING, State.CANCELLING))


@pytest.mark.medium
def test_the_migrations_make_the_tables(database):
    """As tables.py has them: autogenerate finds nothing to do."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    with database.reading() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
    database.migrate()  # again changes nothing


def test_the_searches_of_the_first_schema_are_kept(database):
    """What an earlier version queued is there after its schema was brought up to date, and is run."""
    (search_id,) = queued(database)
    before = Searches(database).get(search_id)
    with database.writing() as connection:
        for column in ("retry_at", "told_at"):
            connection.exec_driver_sql(f"ALTER TABLE searches DROP COLUMN {column}")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0001'")
    database.close()
    database.migrate()
    assert Searches(database).get(search_id) == before
    assert Leases(database, "home", 30.0).claim().search_id == search_id


def test_a_newer_schema_is_refused_and_left_alone(database):
    with database.writing() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(UserError, match="9999, which a newer autotune wrote"):
        database.migrate()
    with database.writing() as connection:
        connection.exec_driver_sql("DROP TABLE alembic_version")
        METADATA.drop_all(connection)
    database.migrate()


def test_a_schema_half_made_is_refused_and_left_alone(database):
    """As after a restore that broke off; and a migration that breaks off leaves nothing."""
    METADATA.tables["trials"].drop(database.engine)
    with database.writing() as connection:
        connection.exec_driver_sql("DELETE FROM alembic_version")
    before = inspect(database.engine).get_table_names()
    with pytest.raises(UserError, match=r"archives.*already exists.*Nothing was changed"):
        database.migrate()
    assert inspect(database.engine).get_table_names() == before
    with database.writing() as connection:
        for name in ("events", "searches", "archives", "tokens"):
            connection.exec_driver_sql(f"DROP TABLE {name}")
        METADATA.tables["tokens"].create(connection)  # what stands in the way of the second table
    with pytest.raises(UserError, match=r"tokens.*already exists"):
        database.migrate()
    assert sorted(inspect(database.engine).get_table_names()) == ["alembic_version", "tokens"]
    METADATA.tables["tokens"].drop(database.engine)
    database.migrate()
    assert {*inspect(database.engine).get_table_names()} >= METADATA.tables.keys()


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


@pytest.mark.medium
def test_a_race_for_a_lease_has_one_winner(database):
    """50, forced by a barrier, of threads and processes: for one queue, a lease that is over, a claim and a cancel."""
    url = database.engine.url.render_as_string(hide_password=False)
    assert race(url, 50) == []


@pytest.mark.medium
def test_what_was_said_is_stored_once_however_often_it_is_written(database):
    """The commit was done, and its answer lost: the same is written again."""
    (search_id,) = queued(database)
    leases = Leases(database, "home", 30.0)
    lease = leases.claim()
    row = {"event": "trial_ended", "number": 0, "outcome": "measured"}
    for _ in range(3):
        leases.record(lease, [row], 10, {"num_ended": 1})
    events, _ = Searches(database).events(search_id, 0)
    assert [event.kind for event in events] == ["state", "state", "trial_ended"]
    leases.finish(lease, State.ERROR, "")


def test_the_highest_priority_is_next_then_the_oldest(tmp_path):
    database = Database(f"sqlite:///{tmp_path}/service.db")
    database.migrate()
    first, second, third = queued(database, 3)
    Searches(database).set_priority(third, 90)
    leases = Leases(database, "home", 30.0)
    assert [leases.claim().search_id for _ in range(3)] == [third, first, second]
    database.close()


def test_owners_take_turns_within_a_priority(database):
    """Flo has queued four before two of Gus, and one of Eve is more urgent: Eve, then Flo and Gus in turn. The queue
    says so before."""
    searches = Searches(database)
    names = {searches.submit(SPEC, owner, None)[0].id: owner for owner in ("flo",) * 4 + ("gus",) * 2 + ("eve",)}
    searches.set_priority([*names][-1], 90)
    leases, order = Leases(database, "home", 30.0), []
    queue = leases.queue()
    assert [names[each] for each, _ in queue] == [owner for _, owner in queue]
    while lease := leases.claim():
        order.append(names[lease.search_id])
        leases.begin(lease, 1, 1)
        leases.finish(lease, State.ERROR, "")
    assert order == ["eve", "flo", "gus", "flo", "gus", "flo", "flo"] == [owner for _, owner in queue]
    assert leases.queue() == []


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


def test_two_servers_with_one_database_run_what_was_sent_to_each(tmp_path, postgresql):
    """An archive lies in one server's folder: the other neither takes its search, nor says that the archive is there,
    nor forgets the search when it is old."""
    url = postgresql.create("twoservers")
    idle = replace(OPTIONS, program=("false",))
    with serving(tmp_path / "a", idle, url) as (_, a), serving(tmp_path / "b", OPTIONS, url) as (client, b):
        body = spec(client, trials=1)
        a.runner.wake()
        search_id = client.post("/v1/searches", json=body).json()["id"]
        search = until(client, search_id, *END_STATES)
        assert (search["state"], search["attempt"]) == ("SUCCEEDED", 1)
        other = TestClient(make_app(a), base_url=LOCAL, headers=bearer(a.tokens.make_for_run()))
        assert other.post("/v1/searches", json=body).status_code == 422
        assert forget_old(a, -1.0) == (0, 0)
        assert forget_old(b, -1.0) == (1, 1)
        assert not b.places.search(search_id).path.exists()


def test_what_only_postgresql_refuses_is_refused_before(tmp_path, postgresql):
    """The largest number of a page, the longest key of the longest name, a null character in an error and in a log."""
    with serving(tmp_path / "a", url=postgresql.create("refusals")) as (client, service):
        assert client.get(f"/v1/searches?before={2**31 - 1}").json() == []
        assert client.get(f"/v1/searches?before={2**31}").status_code == 422
        _, secret = service.tokens.create("x" * 100, "submit", 3600.0)
        headers = {"Authorization": f"Bearer {secret}"}
        data = archive(model__py=json.dumps({"error": "a\0b", "exit_code": 2}))
        sha256 = client.put(f"/v1/archives/{hashlib.sha256(data).hexdigest()}", content=data, headers=headers).json()
        body = {"task": "model.py", "archive": sha256["sha256"]}
        for length, status in ((199, 201), (200, 422)):
            keyed = {**headers, "Idempotency-Key": "k" * length}
            assert client.post("/v1/searches", json=body, headers=keyed).status_code == status
        client.headers.update(headers)
        (search,) = client.get("/v1/searches").json()
        assert until(client, search["id"], *END_STATES)["message"] == r"a\0b"


def test_a_postgresql_that_takes_no_writes_for_a_while_is_told_and_nothing_is_lost(tmp_path, postgresql):
    """As after a failover to a copy: `/readyz` and what would be written say so, reads are answered; what runs goes on
    to its end; connections that were opened meanwhile would be read-only for ever."""
    url = postgresql.create("readonly")
    with serving(tmp_path / "s", url=url) as (client, service):
        runs = submit(client, trials=2, holds_at="reference")
        folder = service.places.search(runs).path
        while not (folder / "held").exists():
            until(client, runs, "QUEUED", "LEASED", "RUNNING")
        search = spec(client, trials=1)
        postgresql.let_be_written("readonly", False)
        for answer in (client.get("/readyz"), client.post("/v1/searches", json=search)):
            assert (answer.status_code, "read-only" in answer.json()["detail"]) == (503, True), answer.text
        with ExitStack() as stack:
            for _ in range(8):
                stack.enter_context(service.database.reading())
        assert client.get(f"/v1/searches/{runs}").json()["state"] == "RUNNING"
        postgresql.let_be_written("readonly", True)
        ends = time.monotonic() + 60.0
        while (ready := client.get("/readyz")).status_code != 200:
            assert time.monotonic() < ends, ready.text
        (folder / "go").touch()
        answers = [client.post("/v1/searches", json=search) for _ in range(16)]
        assert [each.status_code for each in answers[-8:]] == [201] * 8
        found = [until(client, search_id, *END_STATES) for search_id in (runs, answers[-1].json()["id"])]
        assert [(each["state"], each["attempt"]) for each in found] == [("SUCCEEDED", 1)] * 2


def test_the_reason_to_wait_is_gone_once_it_runs(database):
    (search_id,) = queued(database)
    leases, searches = Leases(database, "a", 30.0), Searches(database)
    leases.give_back(leases.claim(), "the server was stopped", is_failure=False)
    assert searches.get(search_id).message == "the server was stopped"
    leases.begin(leases.claim(), 1, 1)
    assert searches.get(search_id).message == ""


@pytest.mark.medium
@pytest.mark.parametrize("died", [False, True], ids=["while it runs", "after its server died"])
@pytest.mark.parametrize("url", ["sqlite", "postgresql"])
def test_what_the_database_never_takes_ends_the_search(tmp_path, request, url, died):
    """Its driver's first trial: others go on."""
    name = "never" + ("after" if died else "while")
    own = None if url == "sqlite" else request.getfixturevalue("postgresql").create(name)
    refuse = "ALTER TABLE trials ALTER COLUMN outcome TYPE varchar(4)"
    if own is None:
        refuse = "CREATE TRIGGER no_trials BEFORE INSERT ON trials BEGIN SELECT RAISE(ABORT, 'too long'); END"
    with serving(tmp_path / "a", url=own) as (client, service):
        with service.database.writing() as connection:
            connection.exec_driver_sql(refuse)
        if died:
            service.runner.close()
        search_id = client.post("/v1/searches", json=spec(client, trials=2)).json()["id"]
        if died:
            lease = service.runner._leases.claim()
            folder = service.places.search(search_id)
            folder.path.mkdir()
            said = {"event": "trial_ended", "number": 0, "outcome": "measured"}
            folder.progress(lease.attempt).write_text(json.dumps(said) + "\n")
    with serving(tmp_path / "a", url=own) as (client, _):
        search = until(client, search_id, *END_STATES)
        assert search["state"] == "ERROR"
        assert search["message"].startswith("the database does not take what its driver reported: ")
        assert "too long" in search["message"]
        assert until(client, client.post("/v1/searches", json=spec(client, error="x")).json()["id"], "FAILED")


@pytest.mark.medium
def test_drivers_that_die_one_after_the_other_end_in_an_error(tmp_path):
    """At the third; a trial between them begins the count anew."""
    database = Database(f"sqlite:///{tmp_path}/service.db")
    database.migrate()
    (search_id,) = queued(database)
    leases = Leases(database, "home", 30.0, (0.0, 0.0))
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


@pytest.mark.medium
def test_a_search_that_failed_waits_before_it_is_tried_again(database):
    """10 s, then 60 s, by the database's clock; others are taken meanwhile. It ends at the third failure."""
    search_id, other = queued(database, 2)
    searches, leases = Searches(database), Leases(database, "home", 30.0)
    for again in ("It is tried again in 10 s (try 2 of 3).", "It is tried again in 1 min 00 s (try 3 of 3)."):
        leases.give_back(leases.claim(), "signal 9.", is_failure=True)
        assert searches.events(search_id, 0)[0][-1].data["words"] == f"signal 9. {again}"
        assert (searches.get(search_id).message, searches.get(search_id).retry_at is None) == ("signal 9.", False)
        between = leases.claim()
        assert (between.search_id, leases.claim()) == (other, None)
        leases.give_back(between, "", is_failure=False)
        searches.set_priority(search_id, 90)
        wait(database, search_id, now())  # the pause is over
    leases.give_back(leases.claim(), "signal 9.", is_failure=True)
    search = searches.get(search_id)
    assert (search.state, search.retry_at) == (State.ERROR, None)


@pytest.mark.parametrize("why", ["it is cancelled", "the clock was set back"])
def test_a_pause_holds_nobody_up(database, why):
    """Who cancels does not wait for the next try; and none lasts an hour because the clock was wrong when it began."""
    (search_id,) = queued(database)
    searches, leases = Searches(database), Leases(database, "home", 30.0)
    leases.give_back(leases.claim(), "signal 9.", is_failure=True)
    if why == "it is cancelled":
        searches.cancel(search_id, "finish")
    else:
        wait(database, search_id, now() + 3600.0)
    assert leases.claim().search_id == search_id
    assert searches.get(search_id).retry_at is None


def wait(database, search_id, until):
    with database.writing() as connection:
        connection.execute(update(SEARCHES).where(SEARCHES.c.id == search_id).values(retry_at=until))


def test_the_client_asks_again_and_says_why_not(monkeypatch):
    monkeypatch.setattr("autotune.service.client.time.sleep", lambda seconds: None)
    with Client("http://127.0.0.1:9") as client, pytest.raises(ServiceError, match="cannot be reached") as refused:
        client.search("0" * 16)
    assert (refused.value.status, refused.value.exit_code) == (0, 2)


@pytest.mark.parametrize("search_id", ["", "../tokens", "0" * 15, "\x1b[2J"])
def test_what_is_no_searchs_id_is_not_asked_for(search_id):
    with Client("http://127.0.0.1:9") as client, pytest.raises(ServiceError, match="a search's id was expected"):
        client.search(search_id)


@pytest.mark.parametrize("token", ["atn_…", "atn_a\nb", "atn_\x1b[2J"])
def test_a_token_that_no_header_can_hold_is_refused_and_not_told(token):
    with pytest.raises(ServiceError, match="AUTOTUNE_TOKEN") as refused:
        Client("http://127.0.0.1:9", token)
    assert token not in str(refused.value)


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


def test_a_submit_makes_the_server_look_for_work_and_not_for_leases_that_ended(tmp_path):
    """A query for each submit is saved: leases end by time alone."""
    asked = []

    class Empty:
        def expired(self, *, all_held):
            asked.append("expired")
            return []

        def claim(self, owners):
            asked.append("claim")

    runner = Runner(Empty(), Places(tmp_path), RunnerOptions(beat_s=60.0))
    runner.start()
    try:
        for claims in range(2, 6):
            runner.wake()
            ends = time.monotonic() + 30
            while asked.count("claim") < claims and time.monotonic() < ends:
                time.sleep(0.005)
                runner.wake()
    finally:
        runner.close()
    assert asked.count("claim") >= 5
    assert asked.count("expired") == 1
