"""The service, over HTTP, with a driver that takes no time: what a search becomes, and that nothing is lost."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from contextlib import ExitStack
from dataclasses import replace

import pytest
from full_disk import read_only
from service_runs import ENDS, OPTIONS, serving, spec, submit, until
from sqlalchemy import select

from autotune.service.driver import SearchFolder
from autotune.service.store.tables import SEARCHES


def states(client, search_id):
    events = client.get(f"/v1/searches/{search_id}/events").json()
    assert [event["seq"] for event in events] == [*range(1, len(events) + 1)]  # gapless
    return [event["data"]["state"] for event in events if event["kind"] == "state"]


def test_a_search_goes_from_submit_to_its_plan(client):
    """Every state is an event, trials are kept, and the plan and its report can be fetched."""
    search_id = submit(client, trials=3)
    search = until(client, search_id, *ENDS)
    assert (search["state"], search["message"], search["has_plan"]) == ("SUCCEEDED", "", True)
    assert states(client, search_id) == ["QUEUED", "LEASED", "RUNNING", "SUCCEEDED"]
    assert [trial["number"] for trial in client.get(f"/v1/searches/{search_id}/trials").json()] == [0, 1, 2]
    assert client.get(f"/v1/searches/{search_id}/plan").text == "schema: autotune/plan@1\nsettings: {}\n"
    assert "autotune" in client.get(f"/v1/searches/{search_id}/report").text
    said = client.get(f"/v1/searches/{search_id}/log").text.splitlines()
    assert (said[0], said[-1]) == ("the driver speaks", "next  autotune show plan.yaml")
    assert search["summary"]["best"]["samples_per_s"] == 102.0


def test_all_searches_of_a_server_keep_what_they_measure_in_one_place(client):
    """Where a search of a known job finds it: drivers are told by ``--measurements``."""
    kept = client.app.state.service.places.state / "measurements.db"
    searches = [until(client, submit(client, trials=1), *ENDS)["id"] for _ in range(2)]
    assert kept.read_text().split()[-2:] == searches


@pytest.mark.parametrize(("code", "state"), [(1, "ERROR"), (2, "FAILED"), (3, "NOTHING_FITS")])
def test_an_exit_code_becomes_the_state_with_its_words(client, code, state):
    search = until(client, submit(client, error="model.py: it is at fault", exit_code=code), *ENDS)
    assert (search["state"], search["message"]) == (state, "model.py: it is at fault")
    answer = client.get(f"/v1/searches/{search['id']}/plan")
    assert (answer.status_code, answer.headers["content-type"]) == (409, "application/problem+json")


def test_the_list_is_filtered_and_what_waits_has_a_place(client):
    """By states, owner and a part of the name, whose wildcards are letters; places count from 1."""
    held = [submit(client, trials=1000, seconds=0.05) for _ in range(2)]
    for search_id in held:
        until(client, search_id, "RUNNING")
    job = spec(client, trials=1)
    waits = [client.post("/v1/searches", json={**job, "name": name}).json() for name in ("100% A_b", "other")]

    def listed(**like):
        return [each["id"] for each in client.get("/v1/searches", params=like).json()]

    first, second = (each["id"] for each in waits)
    assert client.get("/v1/queue").json() == {first: 1, second: 2}
    assert listed(state=["QUEUED"]) == [second, first]
    assert listed(state=["QUEUED", "RUNNING"]) == [second, first, *reversed(held)]
    assert listed(name="% a_B") == [first]
    assert listed(name="a%b") == listed(owner="nobody") == []
    assert first in listed(owner=waits[0]["owner"])
    assert client.get("/v1/searches", params={"state": "GONE"}).status_code == 422
    answer = client.get(f"/v1/searches/{first}/archive")
    assert hashlib.sha256(answer.content).hexdigest() == job["archive"]
    for search_id in (*held, first, second):
        client.post(f"/v1/searches/{search_id}/cancel", json={"mode": "now"})
        until(client, search_id, *ENDS)


def test_what_is_old_is_forgotten_with_its_files(client):
    """A search that has ended, an archive that none needs, and the folder of a search whose database is gone; what
    runs, and its archive, stay."""
    from autotune.service.service import forget_old

    service = client.app.state.service
    old = until(client, submit(client, trials=1, name="old"), *ENDS)
    running = submit(client, trials=10_000, seconds=0.05)
    archives = {client.get(f"/v1/searches/{each}").json()["spec"]["archive"] for each in (old["id"], running)}
    lost = service.places.search("0" * 16)
    lost.work.mkdir(parents=True)
    assert forget_old(service, 3600.0) == (0, 0)
    assert lost.work.is_dir()
    assert forget_old(service, -1.0)[0] >= 1
    assert client.get(f"/v1/searches/{old['id']}").status_code == 404
    kept = client.get(f"/v1/searches/{running}").json()["spec"]["archive"]
    assert archives & {path.name for path in service.places.archives.iterdir()} == {kept}
    assert not service.places.search(old["id"]).path.exists()
    assert not lost.path.exists()
    client.post(f"/v1/searches/{running}/cancel", json={"mode": "now"})


def test_what_ran_the_trials_and_failed_is_not_the_users_fault(client):
    """Exit code 2, as of a user's mistake; but it says nothing of what was submitted. It is tried again, three times in
    all, and can be resumed."""
    lost = "the cluster has gone.\n--resume goes on"
    search = until(client, submit(client, error=lost, exit_code=2, kind="TrialsLost"), *ENDS)
    assert (search["state"], search["attempt"]) == ("ERROR", 3)
    assert search["message"].startswith("the cluster has gone. That was 3 times in a row.")
    said = [event["data"].get("words") for event in client.get(f"/v1/searches/{search['id']}/events").json()]
    assert "the cluster has gone. It is tried again in 0 s (try 2 of 3)." in said
    assert client.post(f"/v1/searches/{search['id']}/resume").status_code == 202


def test_where_the_disk_is_full_searches_wait(client, monkeypatch):
    """No driver is begun, `/readyz` says why, and what waits can be cancelled; with room again it runs."""
    monkeypatch.setattr("autotune.service.supervisor.LEAST_FREE_BYTES", 2**60)
    ready = client.get("/readyz")
    assert (ready.status_code, "disk is full" in ready.json()["detail"]) == (503, True)
    waits, other = submit(client, trials=1, name="waits"), submit(client, trials=1, name="other")
    assert client.post(f"/v1/searches/{other}/cancel", json={"mode": "now"}).json()["state"] == "CANCELLED"
    assert client.get(f"/v1/searches/{waits}").json()["state"] == "QUEUED"
    monkeypatch.undo()
    assert until(client, waits, *ENDS)["state"] == "SUCCEEDED"
    assert client.get("/readyz").status_code == 200


def test_a_database_that_is_removed_or_replaced_under_the_server_is_noticed(tmp_path):
    """`/readyz` says so, nothing is taken that would be lost, and once the file is back the server goes on."""
    with serving(tmp_path / "s") as (client, _):
        search = spec(client, trials=1)
        files = [*(tmp_path / "s").glob("service.db*")]
        (tmp_path / "away").mkdir()
        for path in files:
            path.rename(tmp_path / "away" / path.name)
        for replace in (False, True):
            if replace:
                shutil.copy(tmp_path / "away" / "service.db", tmp_path / "s" / "service.db")
            for answer in (client.get("/readyz"), client.post("/v1/searches", json=search)):
                said = answer.json()["detail"]
                assert (answer.status_code, "file was removed or replaced" in said) == (503, True), said
        for path in files:
            (tmp_path / "away" / path.name).rename(path)
        assert client.get("/readyz").status_code == 200
        search_id = client.post("/v1/searches", json=search).json()["id"]
        assert until(client, search_id, *ENDS)["state"] == "SUCCEEDED"


def test_a_database_that_is_read_only_for_a_while_is_told_and_nothing_is_lost(tmp_path):
    """With its folder, as on a disk that had an error: `/readyz` and what would be written say so, reads are answered;
    what runs goes on to its end, and writes are taken again by connections that were opened meanwhile, too."""
    with serving(tmp_path / "s") as (client, service):
        runs = submit(client, trials=2, holds_at="reference")
        folder = service.places.search(runs).path
        while not (folder / "held").exists():
            until(client, runs, "QUEUED", "LEASED", "RUNNING")
        search = spec(client, trials=1)
        with read_only(tmp_path / "s"):
            for answer in (client.get("/readyz"), client.post("/v1/searches", json=search)):
                assert (answer.status_code, "read-only" in answer.json()["detail"]) == (503, True), answer.text
            with ExitStack() as stack:
                for _ in range(8):
                    stack.enter_context(service.database.reading())
            assert client.get(f"/v1/searches/{runs}").json()["state"] == "RUNNING"
        assert client.get("/readyz").status_code == 200
        answers = [client.post("/v1/searches", json=search) for _ in range(8)]
        assert [each.status_code for each in answers[1:]] == [201] * 7
        (folder / "go").touch()
        ends = [until(client, search_id, *ENDS) for search_id in (runs, answers[-1].json()["id"])]
        assert [(each["state"], each["attempt"]) for each in ends] == [("SUCCEEDED", 1)] * 2


def test_a_long_log_is_cut_to_its_end(tmp_path):
    """5 MiB become 256 KiB, which say so; the driver, which has the file open, goes on behind them."""
    folder = SearchFolder(tmp_path)
    with folder.log.open("ab", buffering=0) as driver:
        driver.write(b"x" * 2**20)
        folder.cut_log()
        assert folder.log.stat().st_size == 2**20
        driver.write(b"x" * 4 * 2**20 + b"the end, ")
        folder.cut_log()
        driver.write(b"and more")
    said = folder.log.read_bytes()
    assert said.startswith(b"[what was printed before was cut]\nxxx")
    assert said.endswith(b"xxxthe end, and more")
    assert len(said) < 257 * 2**10


def test_a_search_whose_archive_is_gone_says_so_and_goes_on_with_it(client):
    """Somebody has tidied up in the service's folder."""
    archives = client.app.state.service.places.archives
    blockers = [submit(client, trials=1000, seconds=0.05, name=name) for name in ("one", "other")]
    search_id = submit(client, trials=1, name="waits")
    archive = archives / client.get(f"/v1/searches/{search_id}").json()["spec"]["archive"]
    away = shutil.move(archive, archives.parent / "away")
    for blocker in blockers:
        client.post(f"/v1/searches/{blocker}/cancel", json={"mode": "now"})
    search = until(client, search_id, *ENDS)
    assert (search["state"], "is gone from the service's folder" in search["message"]) == ("ERROR", True)
    shutil.move(away, archive)
    client.post(f"/v1/searches/{search_id}/resume")
    assert until(client, search_id, *ENDS)["state"] == "SUCCEEDED"


def test_a_driver_that_dies_goes_on_and_measures_nothing_twice(client, tmp_path_factory):
    """SIGKILL between a trial's outcome and its event: the next driver has it from the study."""
    search = until(client, submit(client, trials=4, dies_at=1), *ENDS)
    assert (search["state"], search["attempt"]) == ("SUCCEEDED", 2)
    assert states(client, search["id"]) == ["QUEUED", "LEASED", "RUNNING", "QUEUED", "LEASED", "RUNNING", "SUCCEEDED"]
    assert [trial["number"] for trial in client.get(f"/v1/searches/{search['id']}/trials").json()] == [0, 1, 2, 3]
    proof = client.app.state.service.places.search(search["id"]).path / "proof"
    assert proof.read_text().split() == ["0", "1", "2", "3"]


def test_cancel_finish_gives_the_best_so_far(client):
    search_id = submit(client, trials=1000, seconds=0.05)
    until_trials(client, search_id)
    assert client.post(f"/v1/searches/{search_id}/cancel", json={"mode": "finish"}).status_code == 202
    search = until(client, search_id, *ENDS)
    assert (search["state"], search["message"]) == ("SUCCEEDED", "ended early: the best so far")
    assert states(client, search_id)[-2:] == ["CANCELLING", "SUCCEEDED"]


def test_what_was_cancelled_may_yet_have_a_plan(client):
    """`fetch` of it says how; of what fits nothing, that there will be none."""
    cancelled, other = submit(client, trials=4, holds_at="trial"), submit(client, error="nothing fits", exit_code=3)
    until_trials(client, cancelled)
    asked = client.get(f"/v1/searches/{cancelled}/plan").json()["detail"]
    client.post(f"/v1/searches/{cancelled}/cancel", json={"mode": "now"})
    for search_id in (cancelled, other):
        until(client, search_id, *ENDS)
        asked += client.get(f"/v1/searches/{search_id}/plan").json()["detail"]
    for words in ("no plan yet", f"`autotune resume {cancelled}`", "no plan, and none will come"):
        assert words in asked


def test_a_search_goes_on_with_other_limits(client):
    """Those that are given replace those it had, for good; while it goes on there are no others."""
    search_id = submit(client, trials=4, holds_at="trial")
    until_trials(client, search_id)
    where = f"/v1/searches/{search_id}/resume"
    assert client.post(where, json={"trials": 5}).status_code == 409
    client.post(f"/v1/searches/{search_id}/cancel", json={"mode": "now"})
    until(client, search_id, *ENDS)
    for limits in ({"trials": 0}, {"max_time": "soon"}, {"budget": "1GiB"}):
        assert client.post(where, json=limits).status_code == 422
    resumed = client.post(where, json={"max_time": "2h", "trials": 48}).json()["spec"]
    assert (resumed["max_time"], resumed["trials"]) == ("7200s", 48)
    assert client.post(where, json={"trials": 48}).status_code == 202  # asked again, as where an answer was lost
    assert until(client, search_id, *ENDS)["state"] == "SUCCEEDED"
    options = client.app.state.service.places.search(search_id).path / "options"
    assert "--resume --trials=48 --max-time=7200s" in options.read_text().splitlines()[-1]


def test_a_reference_that_is_measured_again_is_shown_as_it_is(client):
    """It was out of time, and has more after a resume: what the first came to is of no use."""
    search_id = submit(client, trials=2, reference="timed_out")
    assert until(client, search_id, *ENDS)["state"] == "FAILED"
    assert client.get(f"/v1/searches/{search_id}/trials").json()[0]["outcome"] == "timed_out"
    client.post(f"/v1/searches/{search_id}/resume", json={"max_time": "1h"})
    assert until(client, search_id, *ENDS)["state"] == "SUCCEEDED"
    found = client.get(f"/v1/searches/{search_id}/trials").json()
    assert [(row["number"], row["outcome"]) for row in found] == [(0, "measured"), (1, "measured")]


def test_cancel_now_ends_at_once_and_resume_goes_on(client):
    search_id = submit(client, trials=4, holds_at="trial")
    until_trials(client, search_id)
    for _ in range(3):  # again changes nothing
        assert client.post(f"/v1/searches/{search_id}/cancel", json={"mode": "now"}).status_code == 202
    search = until(client, search_id, *ENDS)
    assert (search["state"], search["has_plan"]) == ("CANCELLED", False)
    assert client.post(f"/v1/searches/{search_id}/resume").json()["state"] in ("QUEUED", "LEASED", "RUNNING")
    search = until(client, search_id, *ENDS)
    assert search["state"] == "SUCCEEDED"
    proof = client.app.state.service.places.search(search_id).path / "proof"
    measured = proof.read_text().split()
    assert len(measured) == len(set(measured)) == 4


def until_trials(client, search_id):
    while not client.get(f"/v1/searches/{search_id}/trials").json():
        assert client.get(f"/v1/searches/{search_id}").json()["state"] not in ENDS


@pytest.mark.medium
def test_a_clock_that_jumps_takes_nothing_from_a_server_that_lives(tmp_path):
    """Every lease is over as soon as it is renewed, as where the database's clock jumps ahead: its server knows that it
    is alive, and the search goes on with the driver that it has."""
    with serving(tmp_path / "s", replace(OPTIONS, lease_s=-1.0)) as (client, _):
        search = until(client, submit(client, trials=20, seconds=0.05), *ENDS)
    assert (search["state"], search["attempt"]) == ("SUCCEEDED", 1)


def test_a_driver_that_is_killed_while_it_finishes_does_not_lose_the_plan(client):
    """Cancelled with the best so far, and SIGKILL by somebody else: the next driver has the trials, and finishes."""
    search_id = submit(client, trials=1000, holds_at="cancelling", seconds=0.05)
    until_trials(client, search_id)
    client.post(f"/v1/searches/{search_id}/cancel", json={"mode": "finish"})
    folder = client.app.state.service.places.search(search_id).path
    while not (folder / "held").exists():
        assert client.get(f"/v1/searches/{search_id}").json()["state"] not in ENDS
    with client.app.state.service.database.reading() as connection:
        os.kill(connection.scalar(select(SEARCHES.c.pid).where(SEARCHES.c.id == search_id)), signal.SIGKILL)
    search = until(client, search_id, *ENDS)
    assert (search["state"], search["attempt"], search["has_plan"]) == ("SUCCEEDED", 2, True)
    proof = (folder / "proof").read_text().split()
    assert len(proof) == len(set(proof)) == len(client.get(f"/v1/searches/{search_id}/trials").json())
