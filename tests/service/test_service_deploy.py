"""The files in deploy/, each command as far as a machine without containers and queues goes: with its own shells and
options, the real service and the real Ray. `benchmarks.service_image` builds the image; no operator of KubeRay and no
Slurm runs here."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
import yaml
from service_runs import free_port

from autotune.service.client import Client
from autotune.workers.process import with_variable

DEPLOY = Path(__file__).parents[2] / "deploy"
HOME = "/home/autotune/state"
TASK = (Path(__file__).parents[1] / "tasks" / "healthy.py").read_text()
NEEDS_RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
SRUN = """#!/bin/bash
# Two nodes, both this machine; a signal is passed on, as Slurm does.
for node in 0 1; do SLURM_NODEID=$node "$@" & pids+=($!); done
trap 'kill -TERM "${pids[@]}"' TERM
wait; wait
"""


@pytest.fixture
def commands(tmp_path: Path) -> Mapping[str, str]:
    """An environment with this checkout's `autotune`, and with what only a cluster has."""
    folder = tmp_path / "bin"
    folder.mkdir()
    scripts = {
        "autotune": f'#!/bin/sh\nexec {sys.executable} -m autotune "$@"\n',
        "ray": f'#!/bin/sh\nexec {sys.executable} -m ray.scripts.scripts "$@"\n',
        "scontrol": "#!/bin/sh\necho localhost\n",
        "srun": SRUN,
    }
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    root = str(Path(__file__).parents[2])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "AUTOTUNE_"))}
    kept["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "2"
    return {**kept, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": root, "HOME": str(tmp_path)}


class Service:
    """A command that runs the service, with what it says."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, port: int) -> None:
        self.process, self.log, self.url = process, log, f"http://127.0.0.1:{port}"

    def wait_until_up(self) -> str:
        """Its token, once it answers."""
        while True:
            said = self.log.read_text()
            assert self.process.poll() is None, said
            try:
                if httpx.get(f"{self.url}/healthz").status_code == 200:
                    found = re.search(r"AUTOTUNE_TOKEN=(atn_\S+)", self.log.read_text())
                    return found[1] if found else ""
            except httpx.TransportError:
                time.sleep(0.1)

    def end(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()


@contextmanager
def running(command: list[str], cwd: Path, environment: Mapping[str, str], port: int) -> Iterator[Service]:
    log = cwd / f"{port}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=cwd, env=dict(environment), stdout=file, stderr=file)
    try:
        yield Service(process, log, port)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def lines_of(name: str, word: str) -> list[str]:
    return [line for line in (DEPLOY / name).read_text().splitlines() if line.lstrip("# ").startswith(word)]


@pytest.fixture
def entry(tmp_path: Path) -> list[str]:
    """The image's entry point, with its volume here, made as in the image."""
    text = (DEPLOY / "Containerfile").read_text()
    made = re.search(rf"install -d (.*) {HOME}\n", text)
    assert made is not None
    volume = tmp_path / "volume"
    owner = [] if os.getuid() == 0 else ["-o", str(os.getuid())]
    subprocess.run(["install", "-d", *made[1].split(), *owner, volume], check=True)
    assert volume.stat().st_mode & 0o777 == 0o700
    if os.getuid() == 0:
        assert f"USER {volume.stat().st_uid}\n" in text
    assert text.index("install -d") < text.index("USER ") < text.index("VOLUME ")
    (words,) = lines_of("Containerfile", "ENTRYPOINT")
    return [word.replace(HOME, str(volume)) for word in json.loads(words.removeprefix("ENTRYPOINT "))]


@pytest.mark.slow
def test_a_container_and_its_tokens_have_one_state(tmp_path, commands, entry):
    """`docker run IMAGE token create` before it, `docker exec … token create` beside it, from the working folder."""
    first = subprocess.run([*entry, *TOKEN, "--name", "bob"], env=commands, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    (run,) = lines_of("Containerfile", "docker run")
    options = shlex.split(run.partition("autotune-service ")[2])
    port = free_port()
    with running([*entry, *options, "--port", str(port)], tmp_path, commands, port) as service:
        assert service.wait_until_up() == ""  # there is a token: it prints none
        (line,) = lines_of("Containerfile", "docker exec")
        words = shlex.split(line.partition("docker exec autotune ")[2])
        assert f"WORKDIR {HOME}\n" in (DEPLOY / "Containerfile").read_text()
        second = subprocess.run(words, cwd=tmp_path / "volume", env=commands, capture_output=True, text=True)
        assert second.returncode == 0, second.stderr
        for token, status in ((first.stdout.strip(), 200), (second.stdout.strip(), 200), ("atn_other", 401)):
            answer = httpx.get(f"{service.url}/v1/searches", headers={"Authorization": f"Bearer {token}"})
            assert answer.status_code == status
        assert service.end() == 0
    assert [path.name for path in (tmp_path / "volume").iterdir()] == ["autotune-service"]


TOKEN = ("token", "create", "--role", "admin")


def test_compose_starts_what_docker_run_does():
    """The same image, options, port, volume, shared memory and time to end in; the same command makes a token."""
    (run,) = lines_of("Containerfile", "docker run")
    before, _, options = run.partition("autotune-service ")
    words = shlex.split(before.lstrip("# "))
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["autotune"]
    given = dict(pairwise(words))
    assert service["build"] == {"context": "..", "dockerfile": "deploy/Containerfile"}
    assert service["command"] == shlex.split(options)
    assert (service["ports"], service["volumes"]) == ([given["-p"]], [given["-v"]])
    assert (service["shm_size"], service["stop_grace_period"]) == (given["--shm-size"], f"{given['--stop-timeout']}s")
    assert int(given["--stop-timeout"]) > 60  # drivers get a minute to end
    (made,), (composed,) = (
        lines_of("Containerfile", "docker exec"),
        lines_of("compose.yaml", "docker compose -f deploy/compose.yaml exec"),
    )
    assert made.partition(" exec ")[2] == composed.partition(" exec ")[2]


def test_an_image_is_built_of_what_was_tested():
    """With the versions of constraints.txt, which are those that kuberay.yaml names; `test_distribution` builds the
    wheel from the files that .dockerignore lets through."""
    text = (DEPLOY / "Containerfile").read_text()
    assert "--constraint /src/constraints.txt '/src[service,postgresql]'" in text
    version = re.search("^ray==(.*)$", (DEPLOY.parent / "constraints.txt").read_text(), re.M)
    assert version is not None
    assert cluster()["spec"]["rayVersion"] == version[1]


def cluster() -> dict:
    """The Ray cluster of kuberay.yaml."""
    return documents()["RayCluster"]


def documents() -> dict[str, dict]:
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())}


def pods() -> list[dict]:
    spec = cluster()["spec"]
    return [spec["headGroupSpec"]["template"]["spec"], spec["workerGroupSpecs"][0]["template"]["spec"]]


def test_pods_are_asked_what_they_answer():
    """Each container's probes go to what it serves, and not to Ray's dashboard, which the image does not have; the
    service of the cluster and its disk are those that the pod has; there is time to end in."""
    head, worker = pods()
    spec = cluster()["spec"]
    assert [len(pod["containers"]) for pod in (head, worker)] == [1, 1]  # a driver is beside its Ray
    (port,) = head["containers"][0]["ports"]
    for probe in ("readinessProbe", "livenessProbe"):
        assert head["containers"][0][probe]["httpGet"] == {"path": "/healthz", "port": port["containerPort"]}
        asked = str(worker["containers"][0][probe]["tcpSocket"]["port"])
        assert asked == spec["workerGroupSpecs"][0]["rayStartParams"]["node-manager-port"]
    found = documents()
    assert found["Service"]["spec"]["ports"][0]["targetPort"] == port["containerPort"]
    assert found["Service"]["spec"]["selector"]["ray.io/cluster"] == cluster()["metadata"]["name"]
    (claim,) = (volume["persistentVolumeClaim"]["claimName"] for volume in head["volumes"])
    assert claim == found["PersistentVolumeClaim"]["metadata"]["name"]
    assert head["containers"][0]["volumeMounts"][0]["mountPath"] == HOME
    assert head["terminationGracePeriodSeconds"] > 90


def submitted(service: Service, folder: Path) -> str:
    """A search with a trial: its driver has joined the Ray cluster, with the cluster's token."""
    folder.mkdir()
    (folder / "model.py").write_text(TASK)
    with Client(service.url, service.wait_until_up()) as client:
        spec = {"sampler": "random", "trial_time": "0.2s", "device": "cpu"}
        search_id = client.submit(folder, task="model.py", **spec)["id"]
        while not list(client.trials(search_id)):
            search = client.search(search_id)
            assert search["state"] in ("QUEUED", "LEASED", "RUNNING"), search["message"]
            assert search["attempt"] < 2, search["message"]
            time.sleep(0.2)
    return search_id


def started(name: str, parameters: Mapping[str, str]) -> str:
    """What KubeRay makes of a group's rayStartParams."""
    options = " ".join(f"--{key}={value}" for key, value in parameters.items())
    return f"ray start {name} --block --disable-usage-stats --min-worker-port=0 --max-worker-port=0 {options}"


@NEEDS_RAY
@pytest.mark.slow
def test_a_head_and_a_worker_run_a_search_and_end_in_order(tmp_path, commands):
    """The pods' own commands, with the variables that KubeRay gives them."""
    gcs, web, node = free_port(), free_port(), free_port()
    spec, (head, worker) = cluster()["spec"], pods()
    mark = f"KUBERAY_TEST={gcs}"
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64, "KUBERAY_TEST": str(gcs)}
    temporary = f"/tmp/ray-{gcs}"
    parameters = {**spec["headGroupSpec"]["rayStartParams"], "port": str(gcs), "temp-dir": temporary}
    own = {"KUBERAY_GEN_RAY_START_CMD": started("--head --node-ip-address=127.0.0.1", parameters)}
    own |= {"RAY_ADDRESS": f"127.0.0.1:{gcs}"}
    container = head["containers"][0]
    script = container["args"][0].replace("autotune serve --host 0.0.0.0", f"autotune serve --port {web}")
    assert script != container["args"][0]
    given = {"node-manager-port": str(node), "num-cpus": "1"}
    assert given.keys() >= spec["workerGroupSpecs"][0]["rayStartParams"].keys()
    works = {"KUBERAY_GEN_RAY_START_CMD": started(f"--address=127.0.0.1:{gcs}", given)}
    (tmp_path / "state").mkdir()
    with running([*container["command"], script], tmp_path / "state", {**commands, **auth, **own}, web) as service:
        service.wait_until_up()
        wait_for(gcs)
        pod = worker["containers"][0]
        command = [*pod["command"], *pod["args"]]
        with running(command, tmp_path, {**commands, **auth, **works}, node) as other:
            wait_for(node)
            while "Ray runtime started" not in other.log.read_text():  # it answers before the cluster knows of it
                time.sleep(0.1)
            search_id = submitted(service, tmp_path / "job")
            assert service.end() == 0, service.log.read_text()
            other.end()
    assert "it goes on from what was measured" in states(tmp_path / "state" / "autotune-service", search_id)
    wait_for_end_of(mark)
    shutil.rmtree(temporary)


def wait_for_end_of(mark: str) -> None:
    """No process is left that was started with this variable."""
    ends = time.monotonic() + 60.0
    while left := with_variable(mark):
        assert time.monotonic() < ends, left
        time.sleep(0.1)


def wait_for(port: int) -> None:
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.1)


def states(state: Path, search_id: str) -> str:
    """Words of a search, from the database of a server that has ended."""
    from autotune.service.store.database import Database
    from autotune.service.store.searches import Searches

    database = Database(f"sqlite:///{state}/service.db")
    search = Searches(database).get(search_id)
    database.close()
    assert search.state == "QUEUED"
    return search.message


def job(commands: Mapping[str, str], number: int, **more: str) -> dict[str, str]:
    return {**commands, "SLURM_JOB_ID": str(number), "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "localhost", **more}


@NEEDS_RAY
@pytest.mark.slow
def test_two_jobs_share_a_node_and_a_signal_reaches_the_service(tmp_path, commands):
    """Slurm's signal goes to the batch script alone: the search is in the queue again, nothing runs on."""
    first = next(number for number in range(os.getpid(), os.getpid() + 5000) if is_free(number, number + 1))
    jobs = [job(commands, number, AUTOTUNE_STATE=str(tmp_path / str(number))) for number in (first, first + 1)]
    web = [25000 + number % 5000 for number in (first, first + 1)]
    command = ["bash", str(DEPLOY / "slurm.sh")]
    with running(command, tmp_path, jobs[0], web[0]) as one, running(command, tmp_path, jobs[1], web[1]) as other:
        search_id = submitted(one, tmp_path / "job")
        other.wait_until_up()
        assert f"ssh -L {web[1]}:127.0.0.1:{web[1]} localhost" in other.log.read_text()
        assert (one.end(), other.end()) == (0, 0), one.log.read_text()
    assert "it goes on from what was measured" in states(tmp_path / str(first), search_id)
    for number in (first, first + 1):
        wait_for_end_of(f"SLURM_JOB_ID={number}")
        assert not Path(f"/tmp/ray-{number}").exists()


def is_free(*numbers: int) -> bool:
    """Whether the ports of jobs with these numbers are."""
    for port in (base + number % 5000 for number in numbers for base in (20000, 25000)):
        with socket.socket() as server:
            if server.connect_ex(("127.0.0.1", port)) == 0:
                return False
    return True


@pytest.mark.parametrize(
    ("disk", "options", "words"),
    [
        ("nfs", (), "SQLite may lose what it has written there"),
        ("ext2/ext3", ("--host", "0.0.0.0"), "without --tls-certificate and --tls-key"),
    ],
)
def test_a_job_refuses_what_would_lose_or_tell(tmp_path, commands, disk, options, words):
    """Before anything is started: SQLite on a disk of several nodes, and plain HTTP on the network."""
    (tmp_path / "bin" / "stat").write_text(f"#!/bin/sh\necho {disk}\n")
    (tmp_path / "bin" / "stat").chmod(0o755)
    (tmp_path / "bin" / "srun").write_text("#!/bin/sh\necho started >&2\nexit 9\n")
    command = ["bash", str(DEPLOY / "slurm.sh"), *options]
    ended = subprocess.run(command, cwd=tmp_path, env=job(commands, 1), capture_output=True, text=True)
    assert (ended.returncode, words in ended.stderr, "started" in ended.stderr) == (2, True, False), ended.stderr


def test_every_option_that_a_file_gives_is_there():
    """Of `autotune serve` and its tokens, in commands and in comments."""
    said = {word for name in ("Containerfile", "compose.yaml", "kuberay.yaml", "slurm.sh") for word in options_in(name)}
    assert {"--state", "--executor", "--role", "--behind-proxy", "--tls-certificate"} <= said
    words = [("serve", "--help"), ("serve", "token", "create", "--help")]
    helps = [
        subprocess.run([sys.executable, "-m", "autotune", *each], capture_output=True, text=True) for each in words
    ]
    for option in said:
        assert any(option in each.stdout for each in helps), option


def options_in(name: str) -> Iterator[str]:
    """Of lines that name `autotune serve`, or an option of it in words."""
    for line in (DEPLOY / name).read_text().splitlines():
        said = line.partition('"serve"' if line.startswith("ENTRYPOINT") else "autotune serve")[2]
        said += line if line.startswith("# With ") or "--behind-proxy" in line else ""
        yield from re.findall(r"--[a-z][a-z-]+", said.partition(" & ")[0])
