"""What sharing saves: a batch of 12 jobs, four models at three budgets, beside 12 searches of their own.

    python -m benchmarks.batch --keep
    python -m benchmarks.batch --service --keep

Trials of the batch run on two devices, whose clock stands still while searches think (bar: each busy 90 % of the time).
Trials are answered from the tables of benchmarks/replay, through the whole driver, and take as long as they took when
the tables were recorded; a fresh interpreter adds what importing torch takes. Runs are all measured ones, canaries and
finalists included; inspections and predictions are left out on both sides. Bars: at most 60 % of the trials and 60 % of
the time, for plans whose speed, by the table, is within 2 %.

``--service``: three searches on two devices, as a batch and as three drivers of a service that ask its server for their
turns. Bar: both take the same time to 5 %, and find plans as fast to 2 %. Finalists are measured in rounds both ways;
by turns, as a service's searches do it, their processes would be fewer.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from autotune.batch.jobs import Job, Jobs
from autotune.batch.run import prepare_batch
from autotune.batch.turns import Turn
from autotune.batch.turns_of_server import TurnsOfServer
from autotune.searches.driver import search
from autotune.searches.event_base import Event
from autotune.searches.reuse import Reuse
from autotune.searches.store.measurements import Results
from autotune.searches.time_budget import FRESH_EXTRA_S, TimeBudget
from autotune.service.turns import DriverTurns, SearchTurns
from autotune.task_file import task_file
from autotune.techniques import TECHNIQUES, Device, Facts, Settings
from autotune.workers import Executor, Measured, MeasureRequest, Outcome, OutOfMemory, TrialRequest
from autotune.workers.pool import done
from autotune.workers.table import TableExecutor

from .batch_nodes import Nodes
from .replay.play import seconds_of
from .replay.table import BUDGETS, Entry, Table, Truth, load_table
from .rows import HERE, save_rows

MODELS = ("bert_modules", "char_gpt", "digits_cnn", "gru_writer")
BAR, WITHIN, BUSY = 0.6, 0.02, 0.9
_BUDGET, _LOOK_S = "middle", 0.1
TASK = "def build_model(): ...\ndef build_dataset(): ...\ndef compute_loss(model, batch): ...\n"


def main() -> None:
    """Run both, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="add the rows to benchmarks/results/batch-cpu.jsonl")
    parser.add_argument("--service", action="store_true", help="compare a batch with a service")
    arguments = parser.parse_args()
    rows = [(through_service if arguments.service else compare)(seed) for seed in range(arguments.seeds)]
    for row in rows:
        print(service_report(row) if arguments.service else report(row))
    if arguments.keep:
        print(save_rows("batch_service" if arguments.service else "batch", "cpu", rows))


@dataclass(frozen=True)
class Model:
    """One table as a task."""

    table: Table

    @cached_property
    def facts(self) -> Facts:
        """As little as the driver asks for; the reference is the largest batch, as a user would have it."""
        largest = max(each.settings.batch.micro for each in self.table.entries if each.settings.batch)
        has_convolutions = any(each.settings.memory_format.kind == "channels_last" for each in self.table.entries)
        return Facts(
            fingerprint=f"sha256:{hashlib.sha256(self.table.name.encode()).hexdigest()}",
            device=Device(type="cpu", name="the tables' processor", memory_bytes=2**36, bf16=True),
            torch_version="2.13.0",
            num_threads=2,
            host_memory_bytes=2**36,
            num_parameters=10**6,
            num_trainable=10**6,
            num_blocks=4,
            block_name="Block",
            conv_dims=(2,) if has_convolutions else (),
            dataset_length=10**4,
            dataset_kind="map",
            dataset_bytes=None,
            dataset_deterministic=True,
            stackable=True,
            shapes_vary=False,
            shards_by_worker=False,
            loader_options={},
            loader_samples_per_s={0: 1e9},
            effective_batch=largest,
            effective_batch_held=False,
            effective_batch_assumed=False,
            split_error=0.0,
            allow_split=True,
            optimizer="AdamW",
            optimizer_implementations=("for_loop", "foreach", "fused"),
            allocators=("tcmalloc",),
        )

    @cached_property
    def space(self) -> str:
        """The table's own choices, as a search space."""
        found: dict[str, Any] = {"schema": "autotune/space@1"}
        for name in TECHNIQUES:
            choices = dict.fromkeys(getattr(each.settings, name) for each in self.table.entries)
            if len(choices) > 1:
                ordered = sorted(choices, key=lambda one: one.micro if name == "batch" else len(one.model_dump_json()))
                found[name] = [one.model_dump(mode="json", exclude_defaults=True) for one in ordered]
        return yaml.safe_dump(found, sort_keys=False)

    def executor(self, seed: int) -> Timed:
        """Answers as the task would."""
        predicted = {each.settings.as_predicted(self.facts).canonical(): each.predicted for each in self.table.entries}
        rows = self.table.rows(self.facts.device.memory_bytes, seed)
        answers = TableExecutor(self.facts, rows, predict=lambda one: predicted.get(one.canonical()))
        return Timed({self.table.name: (self.table, answers)})


class Timed(Executor):
    """Tables by their tasks' names, one device; counts what is measured, and how long that took when recorded."""

    num_slots = 1

    def __init__(self, tables: Mapping[str, tuple[Table, TableExecutor]]) -> None:
        self.tables = tables
        self.num_trials = self.num_runs = 0
        self.seconds = 0.0
        self._lock = threading.Lock()

    def submit(self, request: TrialRequest) -> Future[Outcome]:
        """A future that is done already."""
        table, answers = self.tables[task_file(request.task).stem]
        with self._lock:
            outcome = answers.submit(request).result()
            outcome = _enforced(request, outcome) if isinstance(request, MeasureRequest) else outcome
            if isinstance(request, MeasureRequest):
                seconds = seconds_of(table, request.plan.settings, outcome) + FRESH_EXTRA_S * request.fresh
                outcome = outcome.model_copy(update={"seconds": seconds})
                self.seconds += seconds
                self.num_runs += 1
                self.num_trials += not request.id.startswith("finalist-")
        return done(outcome)

    def close(self) -> None:
        """Nothing runs."""


def _enforced(request: MeasureRequest, outcome: Outcome) -> Outcome:
    """Ended where the watchdog ends it: the reference is held to no budget, and a table knows of none."""
    limit = request.memory_limit_bytes
    if limit is not None and isinstance(outcome, Measured) and outcome.measurement.peak.process > limit:
        return OutOfMemory(peak_bytes=limit, message="over the budget")
    return outcome


@contextlib.contextmanager
def models_here() -> Iterator[dict[str, Model]]:
    """The models, with a file and a space each in a folder that is the current one."""
    models = {name: Model(plain(load_table(HERE / "replay" / "tables" / f"{name}.jsonl"))) for name in MODELS}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, model in models.items():
            Path(f"{name}.py").write_text(f"{TASK}# {name}\n")
            Path(f"{name}.space.yaml").write_text(model.space)
        yield models


def compare(seed: int) -> dict[str, Any]:
    """One row: the sums, and each job's plans."""
    with models_here() as models:
        jobs = Jobs(jobs=tuple(job(name, budget, models[name].table, seed) for name in MODELS for budget in BUDGETS))
        apart = [(each, *alone(each, models[each.name.partition("-")[0]], seed)) for each in jobs.jobs]
        together = Timed({n: t for m in models.values() for n, t in m.executor(seed).tables.items()})
        nodes = Nodes(together)
        batch = prepare_batch(
            jobs, Path("plans"), {"cpu": nodes}, Results("sqlite:///results.db"), threading.Event(), clock=nodes.clock
        )
        with nodes.going(batch.turns["cpu"]):
            batch.run()
        shared = {run.job.name: run for run in batch.jobs}
    behind, found_by = {}, {}
    for each, _, found in apart:
        name, budget = each.name.split("-")
        table = models[name].table
        truth, plan = Truth(table, table.limit_bytes(budget)), shared[each.name].plan
        assert plan is not None, f"{each.name}: {shared[each.name].why}"
        speeds = [truth.table.by_settings[one.canonical()].mean_log_speed for one in (plan.settings, found)]
        behind[each.name] = round(speeds[1] - speeds[0], 4)
        found_by[each.name] = {"trials": plan.search.trials, "known": plan.search.known or 0} if plan.search else {}
    return {
        "seed": seed,
        "jobs": len(apart),
        "apart": _sums([executor for _, executor, _ in apart]),
        "together": _sums([together]),
        "busy": {each["name"]: each["busy"] for each in batch.devices()},
        "behind": behind,
        "by_job": found_by,
    }


def through_service(seed: int) -> dict[str, Any]:
    """One row: three searches on two devices, both ways."""
    with models_here() as models:
        jobs = Jobs(jobs=tuple(job(name, _BUDGET, models[name].table, seed) for name in MODELS[:3]))

        apart = [Timed({n: t for m in models.values() for n, t in m.executor(seed).tables.items()}) for _ in range(2)]
        batched, served = map(Nodes, apart)
        batch = prepare_batch(
            jobs, Path("plans"), {"cpu": batched}, Results("sqlite:///batch.db"), threading.Event(), clock=batched.clock
        )
        with batched.going(batch.turns["cpu"]):
            batch.run()
        plans = {}

        def search_one(each: Job, server: DriverTurns) -> None:
            stop, options = threading.Event(), each.options(Path("served"), "cpu", False)
            connection = socket.socket(fileno=os.dup(server.theirs.fileno()))
            server.begin()
            turns = TurnsOfServer(connection, served, "cpu", stop, served.clock)
            turn = Turn(turns, served)

            def observe(event: Event) -> None:
                turn.observe(event)
                reuse.observe(event)

            reuse = Reuse(lambda: Results("sqlite:///served.db"), options, each.name, set())  # rounds as in a batch
            time_budget = TimeBudget(options.trial_time, options.max_time, turn.clock)
            plans[each.name] = search(options, turn, observe, stop, time_budget, reuse)
            turns.close()
            server.close()

        Path("served/studies").mkdir(parents=True)
        turns = SearchTurns(served.clock)
        threads = [
            threading.Thread(target=search_one, args=(each, DriverTurns(turns, each.name, 1.0))) for each in jobs.jobs
        ]
        with served.going(turns.queue("cpu")):
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                turns.advance()
                threads[0].join(_LOOK_S)
    behind = {}
    for each in jobs.jobs:
        speeds = models[each.name.partition("-")[0]].table.by_settings
        shared = next(run.plan for run in batch.jobs if run.job.name == each.name)
        assert shared is not None, each.name
        found = [speeds[plan.settings.canonical()].mean_log_speed for plan in (shared, plans[each.name])]
        behind[each.name] = round(found[0] - found[1], 4)
    row: dict[str, Any] = {"seed": seed, "jobs": len(jobs.jobs), "behind": behind}
    for name, nodes, each in zip(("batch", "service"), (batched, served), apart, strict=True):
        row[name] = {**_sums([each]), "busy_s": _sums([each])["seconds"], "seconds": round(nodes.clock(), 1)}
    return row


def service_report(row: Mapping[str, Any]) -> str:
    """For people."""
    batch, service = row["batch"]["seconds"], row["service"]["seconds"]
    worst = max(row["behind"], key=row["behind"].get)
    return (
        f"seed {row['seed']}: {row['jobs']} searches on two devices: {batch:.0f} s as a batch, {service:.0f} s through "
        f"a service: {service / batch - 1:+.1%} (bar 5 %)\n"
        f"  plans: the most behind the batch's is {worst}, by {row['behind'][worst]:.1%} (bar {WITHIN:.0%})"
    )


def plain(table: Table) -> Table:
    """Without a technique that has one choice alone: the reference is to be in the table."""
    single = [name for name in TECHNIQUES if len({getattr(each.settings, name) for each in table.entries}) == 1]
    reset = {name: getattr(Settings(), name) for name in single}
    rows: Sequence[Entry] = [replace(each, settings=each.settings.model_copy(update=reset)) for each in table.entries]
    return replace(table, entries=tuple(rows))


def job(name: str, budget: str, table: Table, seed: int) -> Job:
    """One search of a model at one budget."""
    limit = table.limit_bytes(budget)
    return Job(name=f"{name}-{budget}", task=f"{name}.py", space=f"{name}.space.yaml", budget=limit, seed=seed)


def alone(each: Job, model: Model, seed: int) -> tuple[Timed, Settings]:
    """A search of its own, as a user would run it: what it cost, and the settings of its plan."""
    executor, folder = model.executor(seed), Path("apart")
    (folder / "studies").mkdir(parents=True, exist_ok=True)
    plan = search(each.options(folder, "cpu", False), executor, lambda event: None, threading.Event())
    return executor, plan.settings


def _sums(executors: Sequence[Timed]) -> dict[str, float]:
    return {
        "trials": sum(each.num_trials for each in executors),
        "runs": sum(each.num_runs for each in executors),
        "seconds": round(sum(each.seconds for each in executors), 1),
    }


def report(row: Mapping[str, Any]) -> str:
    """For people."""
    lines = [f"seed {row['seed']}: {row['jobs']} jobs"]
    for what in ("trials", "runs", "seconds"):
        apart, together = row["apart"][what], row["together"][what]
        lines.append(f"  {what:8} {apart:8.0f} apart, {together:8.0f} together: {together / apart:.0%} (bar {BAR:.0%})")
    worst = max(row["behind"], key=row["behind"].get)
    lines.append(f"  plans: the most behind is {worst}, by {row['behind'][worst]:.1%} (bar {WITHIN:.0%})")
    busy = ", ".join(f"{share:.0%}" for share in row["busy"].values())
    lines.append(f"  devices: busy {busy} of the time (bar {BUSY:.0%})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
