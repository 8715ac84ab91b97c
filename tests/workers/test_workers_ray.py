"""The Ray executor holds the contract, and survives what Ray adds to go wrong."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
from command_line import start

from autotune.errors import TrialsLost
from autotune.measure.processes import descendants
from autotune.testing.executors import IsolationContract, wait_for_end
from autotune.workers import Failed, InspectRequest, Lost, Measured
from autotune.workers.cluster import ClusterOptions, RayExecutor
from autotune.workers.outcome import OUTCOME
from autotune.workers.process import identify, start_child

pytest.importorskip("ray", reason="Ray is not installed")


class TestRayExecutor(IsolationContract):
    tasks = Path(__file__).parents[1] / "tasks"
    executor_class = RayExecutor

    @pytest.fixture
    def executor(self, ray_executor):
        return ray_executor

    def test_a_trial_is_a_descendant_of_a_ray_worker(self, executor, folder):
        assert any(name.startswith("ray::") for name in self.about(executor, folder)["ancestors"])

    @pytest.mark.slow
    def test_a_killed_worker_is_replaced_and_the_trial_asked_again(self, executor, folder):
        assert isinstance(self.kill_above(executor, folder, generations=2), Measured)

    @pytest.mark.slow
    def test_a_daemon_without_an_environment_ends_with_the_server_that_was_killed(self, executor, folder, pids):
        """Its parents are gone and it has no mark; the trial is run again as if nothing had happened."""
        os.mkfifo(folder / "said")
        future = executor.submit(self.request("hostile_hides_a_daemon", folder))
        daemon = pids.read(1)
        (folder / "said").open("w").close()
        assert isinstance(future.result(), Measured)
        assert wait_for_end(daemon) == []

    @pytest.mark.slow
    @pytest.mark.parametrize("killed", [False, True])
    def test_a_cluster_of_its_own_is_quiet_and_leaves_nothing(self, executor, tmp_path, killed):
        """Another driver has another cluster; its folder goes with it, also where the driver is killed."""
        program = (
            "import os, sys\n"
            "from autotune.measure.processes import descendants\n"
            "from autotune.workers.cluster import RayExecutor\n"
            "with RayExecutor() as executor:\n"
            "    print(executor.address, executor._scratch.path, *descendants())\n"
            "    sys.stdout.flush()\n"
            "    sys.stdin.read()\n"
        )
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        driver = subprocess.Popen([sys.executable, "-P", "-c", program], cwd=tmp_path, text=True, **streams)
        address, folder, *pids = driver.stdout.readline().split()
        started = [process for process in map(identify, map(int, pids)) if process is not None]
        assert address != executor.address
        assert Path(folder).exists()
        if killed:
            driver.kill()
        _, said = driver.communicate()
        assert (driver.returncode, said) == (-9 if killed else 0, "")
        assert wait_for_end(started) == []  # of these its gateway, which removes the folder last
        assert not Path(folder).exists()

    @pytest.mark.slow
    def test_a_search_whose_cluster_dies_ends_and_says_so(self, tmp_path):
        """Ray itself would wait for a dead cluster, and prints the state of what was killed."""
        shutil.copy(self.tasks / "healthy.py", tmp_path)
        running = start("search", "healthy.py", "--trials", "9", "--trial-time", "1s", cwd=tmp_path)
        running.read_until("trial 1 starts")
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(running.process.pid)}
        (raylet,) = [pid for pid, words in commands.items() if words.partition(b"\0")[0].endswith(b"/raylet")]
        os.kill(raylet, signal.SIGKILL)
        ended = running.finish()
        assert (ended.returncode, ended.stdout, ended.left_behind) == (2, "", [])
        assert ended.stderr.endswith(
            "the Ray cluster on this machine has died.\nEvery trial that ended is kept: --resume goes on from there.\n"
        )
        progress = [line for line in ended.stderr.splitlines()[:-2] if not line.startswith("[")]
        assert progress == []  # nothing of Ray's

    @pytest.mark.slow
    def test_a_tasks_folder_is_shipped_to_a_cluster_that_is_joined(self, executor, folder, tmp_path):
        """The trial runs in a copy of it: the traceback names a file of Ray's package folder. A pipe stays here."""
        os.mkfifo(Path(folder) / "a [pipe]")
        request = self.request("hostile_raises", folder)
        program = (
            "import sys\n"
            "from pathlib import Path\n"
            "from autotune.workers import REQUEST\n"
            "from autotune.workers.cluster import RayExecutor\n"
            "with RayExecutor(address=sys.argv[1], working_dir=Path(sys.argv[2])) as executor:\n"
            "    outcome = executor.submit(REQUEST.validate_json(sys.argv[3])).result()\n"
            "print(outcome.model_dump_json(by_alias=True))\n"
        )
        address = executor.address
        command = [sys.executable, "-P", "-c", program, address, folder, request.model_dump_json(by_alias=True)]
        environment = {**os.environ, "RAY_AUTH_MODE": "token"}
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        (Path(folder) / "a [pipe]").unlink()
        assert ended.returncode == 0, ended.stderr
        outcome = OUTCOME.validate_json(ended.stdout)
        assert isinstance(outcome, Failed), outcome
        assert outcome.message == "IndexError: list index out of range"
        assert "/_ray_pkg_" in outcome.traceback


GATEWAY = """
import os, signal, socket, subprocess, sys
from autotune.workers.cluster import Answer, Ask, Ready
from autotune.workers.outcome import Lost
from autotune.workers.protocol import receive, send

program = "trap '' PIPE; exec 3<&0; (echo; read wait <&3) & wait; echo; sleep 600"
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
raylet = subprocess.Popen(["raylet", "-c", program], executable="sh", bufsize=0, **pipes)
raylet.stdout.readline()  # its fork runs
with socket.socket(fileno=int(sys.argv[1])) as client:
    receive(client)
    send(client, Ready(num_slots=1, address="127.0.0.1:1", device_type="cpu").model_dump_json())
    while (text := receive(client)) is not None:
        if sys.argv[2] == "forks":
            raylet.stdin.write(b"\\n")
            raylet.stdout.readline()  # its fork has ended
        lost = Answer(number=Ask.model_validate_json(text).number, outcome=Lost(message="no device is left"))
        if sys.argv[2] == "dies":
            raylet.kill()
        send(client, lost.model_dump_json(by_alias=True))
        if sys.argv[2] == "is left":
            os.kill(os.getpid(), signal.SIGKILL)
"""
"""In place of the process that Ray lives in: it loses each trial, and then its cluster dies, or lives, or is left, or
what its raylet has forked ends."""
REQUEST = InspectRequest(id="1", task="model.py", device="cpu")


def gateway(cluster, command, **options):
    return start_child([sys.executable, "-c", GATEWAY, str(*options["pass_fds"]), cluster], **options)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        ("dies", "has died"),
        ("lives", "trials cannot be run: no device is left"),
        ("forks", "trials cannot be run: no device is left"),
        ("is left", "was lost"),
    ],
)
def test_a_loss_is_told_once_it_is_known_whether_the_cluster_lives(monkeypatch, cluster, told):
    """The slots' words came first at times, and then the end of their cluster was told as theirs."""

    monkeypatch.setattr("autotune.workers.cluster.start_child", partial(gateway, cluster))
    with RayExecutor() as executor, pytest.raises(TrialsLost, match=told):
        executor.ask(REQUEST)


@pytest.mark.medium
def test_who_hears_that_the_cluster_has_died_may_ask_again_at_once(monkeypatch):
    """As a batch does, for its other jobs: it waited for itself."""
    monkeypatch.setattr("autotune.workers.cluster.start_child", partial(gateway, "dies"))
    executor, asked = RayExecutor(), queue.SimpleQueue()
    executor.submit(REQUEST).add_done_callback(lambda _: asked.put(executor.submit(REQUEST)))
    with pytest.raises(TrialsLost, match="has died"):
        asked.get(timeout=60).result()
    executor.close()


def test_a_failure_that_nobody_foresaw_is_answered():
    """The driver would wait for ever."""
    from autotune.workers.ray_pool import _outcome_of

    future = Future()
    future.set_exception(ValueError("no handle"))
    assert _outcome_of(future) == Lost(message="ValueError: no handle")


def test_nodes_stay_known_while_the_cluster_cannot_be_asked():
    """Here it never can: this process has no cluster."""
    from autotune.workers._ray_slot import RaySlot
    from autotune.workers.ray_pool import _Cluster

    options = dict.fromkeys(("device_name", "address", "working_dir"))
    cluster = _Cluster(
        ClusterOptions(device="cpu", gpus_per_trial=1, in_turns=False, folder="", environment={}, **options)
    )
    slot = RaySlot("node", "a")
    assert not cluster.has(slot)
    cluster._seen = {"a": {}}
    assert cluster.has(slot)
