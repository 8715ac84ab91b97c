"""Real searches through the service: whatever happens to the driver, nothing that was measured is lost."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from full_disk import fill, read_only
from service_runs import ENDS, archive, put, serving, until
from sqlalchemy import select

from autotune.plan import load_plan
from autotune.service.store.tables import SEARCHES
from autotune.service.supervisor import RunnerOptions
from autotune.workers.process import identify, with_variable

OPTIONS = RunnerOptions(beat_s=0.05, program=(sys.executable, "-m", "autotune"), driver_options=("--executor=local",))
TASK = (Path(__file__).parents[1] / "tasks" / "healthy.py").read_text()


def submitted(client, **more):
    """A search that runs until it is ended, without ``trials``."""
    sha256 = put(client, archive(model__py=TASK)).json()["sha256"]
    spec = {"task": "model.py", "archive": sha256, "sampler": "random", "trial_time": "0.2s", "device": "cpu", **more}
    return client.post("/v1/searches", json=spec).json()["id"]


def trials_of(client, search_id, count, timeout_s=600.0):
    """What the trials came to, once there are so many."""
    ends = time.monotonic() + timeout_s
    while len(found := client.get(f"/v1/searches/{search_id}/trials").json()) < count:
        search = client.get(f"/v1/searches/{search_id}").json()
        assert search["state"] not in ENDS, search["message"]
        assert time.monotonic() < ends, client.get(f"/v1/searches/{search_id}/log").text
        time.sleep(0.05)
    return found


def driver_of(service, search_id):
    with service.database.reading() as connection:
        return connection.scalar(select(SEARCHES.c.pid).where(SEARCHES.c.id == search_id))


@pytest.mark.slow
def test_a_real_search_survives_its_drivers_death(tmp_path):
    """SIGKILL after the reference: the second driver has it from the study, goes on, and writes a plan when asked."""
    with serving(tmp_path / "state", OPTIONS) as (client, service):
        search_id = submitted(client)
        (reference,) = trials_of(client, search_id, 1)[:1]
        os.kill(driver_of(service, search_id), signal.SIGKILL)
        until(client, search_id, "LEASED", "RUNNING")
        known = len(client.get(f"/v1/searches/{search_id}/trials").json())
        trials_of(client, search_id, known + 1)
        assert client.post(f"/v1/searches/{search_id}/cancel", json={"mode": "finish"}).status_code == 202
        search = until(client, search_id, *ENDS, timeout_s=600.0)
        assert (search["state"], search["attempt"]) == ("SUCCEEDED", 2), search["message"]
        trials = client.get(f"/v1/searches/{search_id}/trials").json()
        assert [trial["number"] for trial in trials] == [*range(len(trials))]
        assert trials[0] == reference  # measured once
        (tmp_path / "plan.yaml").write_text(client.get(f"/v1/searches/{search_id}/plan").text)
        assert load_plan(tmp_path / "plan.yaml").search.stopped == "interrupted"
        assert with_variable(f"AUTOTUNE_SERVICE_SEARCH={search_id}") == []


@pytest.mark.medium
def test_a_driver_that_cannot_say_why_it_ends_is_not_the_users_fault(tmp_path):
    """The real one, where nothing can be printed: it leaves with 2, as of a user's mistake, and without a document."""
    program = ("bash", "-c", f'exec {sys.executable} -m autotune "$@" >/dev/full', "driver")
    with serving(tmp_path / "state", replace(OPTIONS, program=program, pauses_s=(0.1, 0.1))) as (client, _):
        sha256 = put(client, archive(model__py="")).json()["sha256"]
        search_id = client.post("/v1/searches", json={"task": "other.py", "archive": sha256}).json()["id"]
        search = until(client, search_id, *ENDS)
    assert (search["state"], search["attempt"]) == ("ERROR", 3)
    assert "What was to be printed could not be written: No space left on device." in search["message"]


@pytest.mark.slow
def test_a_real_search_waits_for_room_on_a_full_disk(tmp_path, small_disk):
    """Filled after the reference, under the driver's study: the search is in the queue again, which `/readyz` explains,
    and goes on once there is room."""
    with serving(small_disk / "state", OPTIONS, f"sqlite:///{tmp_path}/service.db") as (client, _):
        search_id = submitted(client)
        reference = trials_of(client, search_id, 1)[0]
        ballast = fill(small_disk)
        search = until(client, search_id, "QUEUED", *ENDS)
        ready = client.get("/readyz")
        assert (search["state"], ready.status_code) == ("QUEUED", 503), search["message"]
        assert all("disk is full" in said for said in (search["message"], ready.json()["detail"]))
        ballast.unlink()
        until(client, search_id, "RUNNING", *ENDS)
        assert client.get("/readyz").status_code == 200
        trials = trials_of(client, search_id, 2)
        assert [trial["number"] for trial in trials] == [*range(len(trials))]
        assert trials[0] == reference
        client.post(f"/v1/searches/{search_id}/cancel", json={"mode": "now"})
        assert until(client, search_id, *ENDS)["state"] == "CANCELLED"


@pytest.mark.slow
def test_a_real_search_goes_on_after_its_folder_and_the_database_were_read_only(tmp_path):
    """From the reference on until its driver has ended, which could not write the plan: `/readyz` says so, the end is
    nobody's mistake, although it is known only later, and nothing that was measured is measured again."""
    state = tmp_path / "state"
    with serving(state, replace(OPTIONS, lease_s=1.0)) as (client, service):
        search_id = submitted(client, trials=2)
        reference = trials_of(client, search_id, 1)[0]
        driver = driver_of(service, search_id)
        with read_only(state):
            while identify(driver) is not None:
                ready = client.get("/readyz")
                assert (ready.status_code, "read-only" in ready.json()["detail"]) == (503, True)
                time.sleep(0.5)
            assert client.get(f"/v1/searches/{search_id}").json()["state"] == "RUNNING"  # as it was written last
        search = until(client, search_id, *ENDS)
        assert (search["state"], search["attempt"]) == ("SUCCEEDED", 2), search["message"]
        said = [event["data"].get("words", "") for event in client.get(f"/v1/searches/{search_id}/events").json()]
        assert any("Read-only file system" in words for words in said)
        trials = client.get(f"/v1/searches/{search_id}/trials").json()
        assert [trial["number"] for trial in trials] == [0, 1]
        assert trials[0] == reference


SEEN = """
import os, time
_compute_loss = compute_loss

def compute_loss(model, batch):
    with open(os.environ["SEEN"], "a") as file:
        file.write(f"{os.path.dirname(os.path.abspath(__file__))} {os.getpid()} {time.monotonic()}\\n")
    return _compute_loss(model, batch)
"""


@pytest.mark.slow
def test_trials_of_two_searches_at_a_time_never_run_at_once(tmp_path, monkeypatch):
    """And it is said whom one waits for."""
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    with serving(tmp_path / "state", replace(OPTIONS, num_searches=2, pass_env=("SEEN",))) as (client, _):
        sha256 = put(client, archive(model__py=TASK + SEEN)).json()["sha256"]
        spec = {"task": "model.py", "archive": sha256, "trials": 2, "trial_time": "0.2s", "device": "cpu"}
        both = [client.post("/v1/searches", json={**spec, "name": name}).json()["id"] for name in ("one", "other")]
        waited = set()
        while any(client.get(f"/v1/searches/{each}").json()["state"] not in ENDS for each in both):
            turns = client.get("/v1/turns").json()
            waited |= {(waits, *(other["id"] for other in found)) for waits, found in turns.items()}
            time.sleep(0.05)
        ended = [client.get(f"/v1/searches/{each}").json() for each in both]
    assert [search["state"] for search in ended] == ["SUCCEEDED"] * 2, [search["message"] for search in ended]
    assert {tuple(both), tuple(reversed(both))} <= waited
    spans: dict[tuple[str, str], list[float]] = {}
    for line in (tmp_path / "seen").read_text().splitlines():
        folder, pid, at = line.split()
        spans.setdefault((folder, pid), []).append(float(at))
    ones, others = ([times for (folder, _), times in spans.items() if each in folder] for each in both)
    assert min(len(ones), len(others)) >= 2
    overlaps = [(one, other) for one in ones for other in others if min(one) < max(other) and min(other) < max(one)]
    assert overlaps == []
