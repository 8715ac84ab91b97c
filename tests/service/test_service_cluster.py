"""Searches of one service on one Ray cluster take turns on its devices, and none holds what it does not use."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import PROGRAM
from held_task import HELD
from ray_node import TOKEN, another_node
from service_runs import ENDS, archive, put, serving, until

from autotune.measure.processes import descendants
from autotune.service.supervisor import RunnerOptions
from autotune.workers import Executor
from autotune.workers.cluster import RayExecutor

pytest.importorskip("ray", reason="Ray is not installed")

TASK = (Path(__file__).parents[1] / "tasks" / "healthy.py").read_text()
SEEN = """
import os, time
_compute_loss = compute_loss

def compute_loss(model, batch):
    with open({file!r}, "a") as file:
        file.write(f"{name} {{os.getpid()}} {{time.monotonic()}}\\n")
    return _compute_loss(model, batch)
"""


@pytest.fixture
def options(ray_executor: Executor, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunnerOptions]:
    """Two searches at a time on the session's cluster, of whose devices nothing is held in the end."""
    for name, value in TOKEN.items():
        monkeypatch.setenv(name, value)
    options = ("--executor=ray", f"--address={ray_executor.address}")
    yield RunnerOptions(num_searches=2, beat_s=0.05, program=PROGRAM, driver_options=options, is_cluster=True)
    told = []
    with RayExecutor(address=ray_executor.address, tell=told.append):
        assert told == []  # it would have had to wait


def submitted(client, task):
    sha256 = put(client, archive(model__py=task)).json()["sha256"]
    spec = {"task": "model.py", "archive": sha256, "sampler": "random", "trial_time": "0.2s", "device": "cpu"}
    return client.post("/v1/searches", json=spec).json()["id"]


def explored(client, *searches):
    """Once each has measured a configuration: by whom each waited for whom meanwhile."""
    waited = set()
    while any(len(client.get(f"/v1/searches/{each}/trials").json()) < 2 for each in searches):
        for each in searches:
            search = client.get(f"/v1/searches/{each}").json()
            assert search["state"] not in ENDS, client.get(f"/v1/searches/{each}/log").text
        turns = client.get("/v1/turns").json()
        waited |= {(waits, *(other["id"] for other in found)) for waits, found in turns.items()}
        time.sleep(0.05)
    return waited


def end(client, *searches):
    for each in searches:
        client.post(f"/v1/searches/{each}/cancel", json={"mode": "now"})
    for each in searches:
        until(client, each, "CANCELLED")


def spans(seen):
    """By a search's name, when each process of it began and ended to compute."""
    times = defaultdict(list)
    for line in seen.read_text().splitlines():
        name, pid, at = line.split()
        times[name, pid].append(float(at))
    found = defaultdict(list)
    for (name, _), all_of_it in times.items():
        found[name].append((min(all_of_it), max(all_of_it)))
    return found


@pytest.mark.slow
def test_two_searches_on_a_cluster_of_one_device_take_turns(options, tmp_path):
    """Each waits for the other at times, which is said; they never compute at once; the second does not wait for the
    first one's end."""
    with serving(tmp_path / "state", options) as (client, _):
        seen = [SEEN.format(file=str(tmp_path / "seen"), name=name) for name in ("one", "other")]
        both = [submitted(client, TASK + text) for text in seen]
        waited = explored(client, *both)
        end(client, *both)
    assert {tuple(both), tuple(reversed(both))} <= waited
    one, other = (spans(tmp_path / "seen")[name] for name in ("one", "other"))
    assert [each for each in one for also in other if each[0] < also[1] and also[0] < each[1]] == []
    assert min(other)[0] < max(one)[1]
    assert min(one)[0] < max(other)[1]


@pytest.mark.slow
def test_two_searches_on_a_cluster_of_two_nodes_measure_at_once(options, ray_executor, tmp_path):
    """On a node each, and neither waits for the other."""
    with (
        another_node(ray_executor.address, tmp_path / "node.log") as node,
        serving(tmp_path / "state", options) as (client, _),
    ):
        both = [submitted(client, HELD.format(name=name, folder=str(tmp_path))) for name in ("one", "other")]
        while len(held := {int(path.name.partition("-")[2]) for path in tmp_path.glob("begun-*")}) < 2:
            assert all(client.get(f"/v1/searches/{each}").json()["state"] not in ENDS for each in both)
            time.sleep(0.05)
        assert len(held & {*descendants(node.process.pid)}) == 1
        assert client.get("/v1/turns").json() == {}
        end(client, *both)
