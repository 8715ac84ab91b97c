"""A bundle that ``autotune search --devices`` wrote on two unlike nodes, trained with on both, against equal shares."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import autotune
from autotune.bundle import BUNDLE, Bundle
from autotune.commands.devices.bundle import save
from autotune.measure.processes import descendants
from autotune.plan import Plan
from autotune.ranks import gathered
from autotune.searches.winner.shares import quickest
from autotune.searches.winner.unlike import Share, SharedTraining
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.parallel import Parallel
from autotune.workers.process import end, identify
from autotune.workers.trial.environment import THREAD_VARIABLES

from .rows import HERE
from .unlike_ranks import EFFECTIVE, TASK, Node, alternated, compared, grouped, on_both

__all__ = ["searched"]

SPACE = "schema: autotune/space@1\nbatch: auto\n"
ROUNDS = 10
_RAY = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-gpus=0")
_SIZE = "--object-store-memory=100000000"


def searched(sample_s: tuple[float, float], trials: int, trial_time: str) -> dict[str, Any]:
    """Search, then train; one row.

    Args:
        sample_s: what a sample takes on the node of all processors, and on that of one.
        trials: of each search.
        trial_time: of a trial's timed steps, as ``--trial-time`` has it.
    """
    every = sorted(os.sched_getaffinity(0))
    assert len(every) > 1, "one processor cannot be two unlike CPUs"
    nodes = Node(frozenset(every), sample_s[0]), Node(frozenset(every[:1]), sample_s[1])
    for name in THREAD_VARIABLES:
        os.environ.pop(name, None)  # a driver hands them on to its trials
    os.environ |= {"PYTHONPATH": str(HERE.parent), "RAY_AUTH_MODE": "disabled"}
    with tempfile.TemporaryDirectory(prefix="unlike-", dir="/tmp") as short:  # Ray's sockets lie in it
        folder = Path(short, "job")  # is shipped to the cluster
        folder.mkdir()
        shutil.copy(TASK, folder)
        (folder / "space.yaml").write_text(SPACE)
        began = time.monotonic()
        with _cluster(Path(short), nodes) as address:
            options = ["--space", "space.yaml", "--trials", str(trials), "--trial-time", trial_time, "--max-time", "2m"]
            command = [sys.executable, "-m", "autotune", "search", TASK.name, *options, "--devices", "cpu"]
            subprocess.run([*command, "--address", address], cwd=folder, stdout=sys.stderr, check=True)
        search_s = time.monotonic() - began
        print((folder / "bundle" / BUNDLE).read_text(), file=sys.stderr)
        alone_per_s = _even_shares(folder)
        row = on_both(nodes, _in_each, str(folder))
    per_s = {name: row.pop(name) for name in ("even", "shared")}
    alone = {"alone_per_s": [round(one, 1) for one in alone_per_s], "search_s": round(search_s)}
    return {**row, **alone, **compared(per_s, alone_per_s)}


@contextmanager
def _cluster(folder: Path, nodes: tuple[Node, Node]) -> Iterator[str]:
    """A Ray cluster of these nodes as long as the body runs; its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    joined = ("--head", f"--port={port}", "--include-dashboard=false"), (f"--address=127.0.0.1:{port}",)
    running: list[subprocess.Popen[bytes]] = []
    try:
        for number, (node, options) in enumerate(zip(nodes, joined, strict=True)):
            log, own = folder / f"{number}.log", ("--node-ip-address=127.0.0.1", f"--temp-dir={folder}/{number}")
            with node.here(), log.open("w") as file:
                command = [*_RAY, _SIZE, *own, f"--num-cpus={len(node.processors)}", *options]
                running.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file))
            while "Ray runtime started" not in log.read_text():
                assert running[-1].poll() is None, log.read_text()[-2000:]
                time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        for each in reversed(running):
            pids = (each.pid, *descendants(each.pid))
            end([process for pid in pids if (process := identify(pid))])
            each.wait()


def _even_shares(folder: Path) -> list[float]:
    """Write a bundle of equal shares, each with the settings that took the least time for it in the search; samples per
    second of the searches' own plans, the first node's first."""
    bundle = Bundle.load(folder / "bundle")
    studies = [(str(path), 1) for path in sorted((folder / "bundle" / "searches" / "studies").glob("*.db"))]
    training = SharedTraining.read(studies)
    half, row = EFFECTIVE // 2, Parallel(kind="ddp", processes=2, effective=EFFECTIVE)
    shares, found = [], {}
    for study, timed in zip(training.studies, training.timed, strict=True):
        one = quickest([*timed], half)
        settings: Settings = timed[one].model_copy(update={"batch": Batch.of(half, one.micro), "parallel": row})
        shares.append(Share(half, Plan(settings=settings), one.seconds_for(half)))
        assert study.plan is not None, "the search ended"
        assert study.plan.measured is not None, "it was measured"
        found[study.record.facts.num_threads] = study.plan.measured.samples_per_s.value
    save(training, shares, folder / "even")
    assert {one.threads for one in bundle.plans} == found.keys()
    return [found[threads] for threads in sorted(found, reverse=True)]


def _in_each(rank: int, folder: str) -> dict[str, Any]:
    task = autotune.load_task(str(Path(folder, TASK.name)))
    plans = {name: autotune.load_plan(Path(folder, where)) for name, where in (("even", "even"), ("shared", "bundle"))}
    with grouped(rank, folder):
        per_s = alternated({name: autotune.apply(plan, task) for name, plan in plans.items()}, ROUNDS)
        batches = gathered({name: plan.settings.batch for name, plan in plans.items()})
    words = {name: [each[name].describe() for each in batches] for name in plans}
    return {"shares": [each["shared"].num_samples for each in batches], "batches": words, **per_s}
