"""GPUs by Ray: which of them an actor trains on, and those of a cluster that other work uses."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from ray_node import TOKEN, another_node

from autotune.commands.where import default_device
from autotune.errors import TrialsLost
from autotune.workers import Failed, InspectRequest, Lost, pool
from autotune.workers.cluster import ClusterOptions, RayExecutor, kind_of_devices
from autotune.workers.devices import Gpu
from autotune.workers.pool import Joining, SlotPool

pytest.importorskip("ray", reason="Ray is not installed")
from autotune.workers import _ray_slot, ray_pool

REQUEST = InspectRequest(id="1", task="model.py", device="cuda")
SMALL, LARGE = Gpu("GPU-1", "NVIDIA GeForce GTX 1060", 6 * 2**30), Gpu("GPU-2", "NVIDIA GeForce RTX 4090", 24 * 2**30)


@pytest.mark.parametrize(("given", "seen"), [(["3"], "3"), (["GPU-1"], "GPU-1"), ([], "0,1")])
def test_an_actor_trains_on_what_ray_has_given_it(monkeypatch, given, seen):
    """Ray does not set CUDA_VISIBLE_DEVICES where RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES tells it so."""
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": given, "TPU": []})
    monkeypatch.setattr(_ray_slot.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(_ray_slot, "adopt_orphans", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert _ray_slot.TrialActor()._slot_on(_ray_slot.gpus_here()).environment["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize(("size", "named"), [(1, ["GPU-2", "GPU-3"]), (2, ["GPU-2,GPU-3"])])
def test_on_this_machine_trials_have_what_they_have_without_ray(monkeypatch, size, named):
    """Unlike GPUs in one machine: each actor is told its own, of which Ray would give it any."""
    monkeypatch.setattr("autotune.workers.placement.visible_gpus", lambda: (SMALL, LARGE, LARGE._replace(uuid="GPU-3")))
    monkeypatch.setattr("autotune.workers.placement.torch_builds", lambda: {"cuda": "13.0"})
    monkeypatch.setattr(ray_pool, "_nodes", lambda device: {"node": {}} if device == "cpu" else {})
    options = ClusterOptions(
        device="cuda",
        device_name="4090",
        gpus_per_trial=size,
        address=None,
        working_dir=None,
        in_turns=False,
        folder="",
        environment={"A": "b"},
    )
    cluster = ray_pool._Cluster(options)
    slots = cluster.slots()
    assert cluster.type == LARGE.type
    assert [(slot.name, slot.node, slot.place.environment) for slot in slots] == [
        (gpu, "node", {"A": "b", "CUDA_VISIBLE_DEVICES": gpu}) for gpu in named
    ]


@pytest.mark.parametrize(("began_with", "seen"), [(b"A=b\0CUDA_VISIBLE_DEVICES=1\0", "1"), (b"A=b\0", None)])
def test_a_nodes_types_are_of_the_gpus_that_it_was_started_with(monkeypatch, began_with, seen):
    """And not of unlike ones beside them. Ray has set the variable to nothing by then, in a worker without a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(ray_pool, "read", lambda path: began_with.decode())
    asked = []

    def visible():
        asked.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return (LARGE,)

    monkeypatch.setattr("autotune.workers.placement.visible_gpus", visible)
    assert (ray_pool._types_on_node("cuda"), asked) == ([LARGE.type], [seen])


class Shared:
    """A slot whose device others use until it is ``free``."""

    def __init__(self, name):
        self.name, self.free, self.joined = name, threading.Event(), threading.Event()

    def gets_device(self, within_s):
        return self.free.wait()

    def run(self, request):
        return Failed(message=self.name)

    def close(self):
        self.free.set()


def test_a_trial_goes_to_the_device_that_is_free(monkeypatch):
    """And to the other once that is. All that is told in the meantime is told once."""
    monkeypatch.setattr(pool, "_PATIENCE_S", 0.0)
    busy, idle, told, came = Shared("busy"), Shared("idle"), [], threading.Semaphore(0)
    with SlotPool([]) as slots:
        joining = Joining(slots, lambda slot: True)
        joining.tell = came.release
        joining.begin([busy, idle])
        joining.wait_for_one(lambda: [told.append(slots.num_slots), idle.free.set()])
        assert told == [0]
        assert [slots.ask(REQUEST).where for _ in range(3)] == ["idle"] * 3
        busy.free.set()
        assert [came.acquire(timeout=60) for _ in range(2)] == [True, True]
        assert slots.num_slots == 2


def test_a_device_that_has_gone_while_it_was_waited_for_does_not_join():
    gone, there = Shared("gone"), Shared("there")
    with SlotPool([]) as slots:
        joining = Joining(slots, lambda slot: slot is there)
        gone.free.set()
        joining._join(gone)
        there.free.set()
        joining._join(there)
        assert slots.num_slots == 1


class Remote:
    """An actor's method: what it is asked for is its name."""

    def __init__(self, name):
        self.remote = lambda *given: name


class FakeRay:
    """Ray, whose actor is up when it says so, as _ray_slot calls it."""

    def __init__(self, answers):
        self.asked, self.killed, self._answers = [], 0, answers
        actor = SimpleNamespace(**{name: Remote(name) for name in ("is_up", "run", "close")})
        self.remote = lambda made: SimpleNamespace(
            options=lambda **options: SimpleNamespace(remote=lambda *place: actor)
        )

    def get(self, what, timeout=None):
        self.asked.append((what, timeout))
        answer = self._answers[what]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self, actor):
        self.killed += 1


def test_a_trials_deadline_begins_when_it_has_its_device(monkeypatch):
    """Others may use it for hours: a trial that did not even begin was lost."""
    ray = FakeRay({"is_up": None, "run": Failed(message="ran").model_dump_json(by_alias=True), "close": None})
    monkeypatch.setattr(_ray_slot, "ray", ray)
    slot = _ray_slot.RaySlot("gpu", "node")
    assert [slot.run(REQUEST).message for _ in range(2)] == ["ran", "ran"]
    limit = REQUEST.latest_s + _ray_slot._GRACE_S
    assert ray.asked == [("is_up", None), ("run", limit), ("run", limit)]


def test_an_actor_that_cannot_come_is_asked_for_anew(monkeypatch):
    ray = FakeRay({"is_up": _ray_slot.RayError("no room there"), "close": None})
    monkeypatch.setattr(_ray_slot, "ray", ray)
    monkeypatch.setattr(_ray_slot, "end_orphans", lambda: None)
    slot = _ray_slot.RaySlot("gpu", "node")
    assert slot.run(REQUEST) == Lost(message="Ray: no room there")
    assert (ray.killed, slot._actor) == (1, None)


def test_who_has_not_come_yet_is_not_asked_to_close(monkeypatch):
    """It would not answer."""
    ray = FakeRay({})
    monkeypatch.setattr(_ray_slot, "ray", ray)
    slot = _ray_slot.RaySlot("gpu", "node")
    assert slot._living_actor() is not None
    slot.close()
    assert (ray.asked, ray.killed) == ([], 1)


HOLDER = """
import ray, sys

@ray.remote(num_gpus=1)
class Holder:
    def is_up(self):
        return True

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
holder = Holder.remote()
ray.get(holder.is_up.remote())
print("holds", flush=True)
sys.stdin.read()
"""
"""Another's work, which has the only GPU until its stdin is closed."""


@pytest.mark.parametrize(
    ("size", "slots"),
    [(1, ["a/aaaaaa GPU 0", "a/aaaaaa GPU 1", "a/aaaaaa GPU 2", "b/bbbbbb GPU 0"]), (2, ["a/aaaaaa GPU 0, 1"])],
)
def test_a_trial_of_several_processes_has_a_gpu_for_each(monkeypatch, size, slots):
    """On one machine of the cluster; what is left over there is too few."""
    nodes = {
        name * 56: {"NodeID": name * 56, "NodeManagerHostname": name, "Resources": {"GPU": number, "CPU": 8}}
        for name, number in (("a", 3.0), ("b", 1.0))
    }
    monkeypatch.setattr(ray_pool, "_nodes", lambda device: nodes)
    options = ClusterOptions(
        device="cuda",
        device_name=None,
        gpus_per_trial=size,
        address="a:1",
        working_dir=None,
        in_turns=False,
        folder="",
        environment={},
    )
    cluster = ray_pool._Cluster(options)
    monkeypatch.setattr(cluster, "_types_on", lambda nodes: {"a" * 56: [LARGE.type] * 3, "b" * 56: [LARGE.type]})
    found = cluster.slots()
    assert [slot.name for slot in found] == slots
    assert {slot.device.needs["GPU"] for slot in found} == {size}


@pytest.mark.slow
def test_a_clusters_own_nodes_say_whether_there_is_a_gpu(ray_executor, monkeypatch):
    """And not the machine of the driver."""
    monkeypatch.setattr("autotune.workers.devices.visible_gpus", lambda: (SMALL,))
    monkeypatch.setenv(*next(iter(TOKEN.items())))
    kind_of_devices.cache_clear()
    assert default_device(ray_executor.address) == "cpu"


def test_a_cluster_that_does_not_answer_says_so(monkeypatch):
    """Ray ends the process that it is in."""
    said = SimpleNamespace(stdout="", stderr="a\n[gcs_client.cc:210] Failed to get cluster ID: TimedOut\n")
    monkeypatch.setattr("autotune.workers.cluster.subprocess.run", lambda *given, **options: said)
    with pytest.raises(TrialsLost, match=r"the Ray cluster at a:1 could not be asked .* Failed to get cluster ID"):
        default_device("a:1")


@pytest.mark.slow
def test_a_search_on_a_shared_cluster_waits_for_a_gpu(ray_executor, tmp_path, monkeypatch):
    """It says so, and begins once it has one; the machine's GPU is one in name alone."""
    monkeypatch.setenv(*next(iter(TOKEN.items())))
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    with another_node(ray_executor.address, tmp_path / "node.log", num_gpus=1):
        command = [sys.executable, "-c", HOLDER, ray_executor.address]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        kind_of_devices.cache_clear()
        assert default_device(ray_executor.address) == "cuda"
        holder = subprocess.Popen(command, env=dict(os.environ), text=True, **pipes)
        assert holder.stdout.readline() == "holds\n"
        told = []

        def let_go(words):
            told.append(words)
            holder.communicate("")

        with RayExecutor("cuda", address=ray_executor.address, working_dir=tmp_path, tell=let_go) as executor:
            assert told == [
                f"the Ray cluster at {ray_executor.address}: all of 1 x GPU are in use by other work. Waiting for one; "
                "Ctrl-C ends that."
            ]
            assert executor.num_slots == 1
