"""A batch over tables: plans, what is measured once for all, what fails alone, what a resume goes on with."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from answering import Answering
from screen import printed
from search_tables import MIB, REFERENCE, SPACE, SPACE_YAML, facts, peak, row, speed, table

from autotune.batch.jobs import load_jobs
from autotune.batch.run import Batch, prepare_batch
from autotune.errors import UserError
from autotune.measure.measurement import Quality
from autotune.plan import load_plan
from autotune.report.batch import outcome_table
from autotune.searches.events import Event, TrialEnded, Warned
from autotune.searches.store.measurements import Results
from autotune.task_file import split_source
from autotune.techniques import Settings
from autotune.techniques.batch import Batch as Micro
from autotune.techniques.models.pruning import Pruning
from autotune.workers import Executor, Failed, MeasureRequest, Outcome, TrialRequest
from autotune.workers.pool import done
from autotune.workers.table import Row, TableExecutor

TASK = "def build_model(): ...\ndef build_dataset(): ...\ndef compute_loss(model, batch): ...\n"
MIDDLE, TIGHT = f"{600 * MIB}", f"{400 * MIB}"


class Tables(Answering):
    """Each task's own table; one device."""

    def __init__(self, tables: Mapping[str, TableExecutor]) -> None:
        self.tables = tables
        self.requests: list[TrialRequest] = []

    def answer(self, request: TrialRequest) -> Outcome:
        self.requests.append(request)
        outcome: Outcome = self.tables[split_source(request.task)[0].stem].submit(request).result()
        return outcome.model_copy(update={"seconds": 1.0})

    def measured(self, prefix: str, task: str = "") -> list[MeasureRequest]:
        """Requests to measure whose name begins so, in order."""
        found = (each for each in self.requests if each.kind == "measure" and each.id.startswith(prefix))
        return [each for each in found if task in each.task]


def tables(*names: str, rows: Iterable[Row] = (), scale: float = 1.0) -> Tables:
    """A table for each task; ``scale`` is how fast the device is."""
    known = facts()
    every = [*table(known, SPACE), *rows]
    scaled = [
        each.model_copy(update={"samples_per_s": tuple(scale * value for value in each.samples_per_s)})
        for each in every
    ]
    return Tables({name: TableExecutor(known, scaled) for name in names})


def write(**jobs: Mapping[str, Any]) -> Path:
    """A jobs file, with the task and the space that its jobs name."""
    Path("space.yaml").write_text(SPACE_YAML)
    rows = [{"name": name, "task": "model.py", "space": "space.yaml", **job} for name, job in jobs.items()]
    for each in rows:
        path = Path(each["task"].partition(":")[0])
        if not path.exists():
            path.write_text(f"{TASK}# {path.stem}\n")
    Path("jobs.yaml").write_text(yaml.safe_dump({"jobs": rows}))
    return Path("jobs.yaml")


def run(executor: Executor, jobs: Path, stop_after: int | None = None, **options: Any) -> tuple[Batch, list[Event]]:
    """The batch after its end, and what was said of all jobs."""
    events: list[Event] = []
    stop = threading.Event()

    def observe(_: object, event: Event) -> None:
        events.append(event)
        if stop_after is not None and sum(isinstance(one, TrialEnded) for one in events) == stop_after:
            stop.set()

    results = Results("sqlite:///results.db")
    batch = prepare_batch(load_jobs(jobs), Path("plans"), {"cpu": executor}, results, stop, observe=observe, **options)
    batch.run()
    return batch, events


def states(batch: Batch) -> dict[str, str]:
    return {job.job.name: job.state for job in batch.jobs}


pytestmark = pytest.mark.usefixtures("in_memory", "elsewhere")


@pytest.mark.medium
def test_each_job_gets_its_plan_and_the_summary_names_it():
    """Two tasks, one within 600 MiB and one without a limit."""
    executor = tables("one", "two")
    batch, _ = run(executor, write(first={"task": "one.py", "budget": MIDDLE}, second={"task": "two.py"}))
    assert states(batch) == {"first": "done", "second": "done"}
    assert load_plan("plans/first.yaml").measured.peak.process * 1.03 <= 600 * MIB
    assert load_plan("plans/second.yaml").budget.limit is None
    rows = yaml.safe_load(Path("plans/summary.yaml").read_text())["jobs"]
    assert {each["name"]: each["plan"] for each in rows} == {"first": "plans/first.yaml", "second": "plans/second.yaml"}


def test_another_budget_for_a_known_task_begins_with_what_is_known():
    """The larger budget runs first, whatever the order of the file; the other runs no reference and few trials. Its own
    run of the batch needs no canary."""
    executor = tables("model")
    batch, _ = run(executor, write(tight={"budget": TIGHT}, loose={}))
    plans = {job.job.name: job.plan for job in batch.jobs}
    assert plans["loose"].search.known is None
    assert plans["tight"].search.known == plans["loose"].search.trials
    assert executor.measured("canary") == []
    assert len(executor.measured("trial-")) == plans["loose"].search.trials + plans["tight"].search.trials
    assert plans["tight"].search.trials < plans["loose"].search.trials


def test_the_same_job_again_costs_a_canary_and_the_finalists():
    """In another batch, by the store alone."""
    jobs = write(job={"budget": MIDDLE})
    first, _ = run(tables("model"), jobs)
    again = tables("model")
    second, _ = run(again, jobs)
    assert [len(again.measured(kind)) for kind in ("canary", "trial-")] == [1, 0]
    assert second.jobs[0].plan.settings == first.jobs[0].plan.settings
    assert len(again.measured("finalist-")) > 0


@pytest.mark.medium
@pytest.mark.parametrize("change", ["the file", "a module that it imports"])
def test_another_code_is_another_task(change):
    """Parameters and shapes are the same: the table's facts do not change."""
    jobs = write(job={})
    Path("model.py").write_text(f"import blocks\n{TASK}")
    Path("blocks.py").write_text("A = 1\n")
    run(tables("model"), jobs)
    changed = Path("model.py" if change == "the file" else "blocks.py")
    changed.write_text(f"{changed.read_text()}B = 2\n")
    again = tables("model")
    run(again, jobs)
    assert again.measured("canary") == []
    assert len(again.measured("trial-")) > 1


@pytest.mark.medium
def test_a_device_that_is_not_as_it_was_is_measured_anew_and_it_is_said():
    """At half the speed: earlier measurements stay where they are, and are not used; later ones are a series of their
    own."""
    jobs = write(job={})
    run(tables("model"), jobs)
    slower = tables("model", scale=0.5)
    batch, events = run(slower, jobs)
    assert batch.jobs[0].plan.search.known is None
    assert len(slower.measured("trial-")) == batch.jobs[0].plan.search.trials > 1
    assert any("left alone" in one.message for one in events if isinstance(one, Warned))
    once_more = tables("model", scale=0.5)
    run(once_more, jobs)
    assert [len(once_more.measured(kind)) for kind in ("canary", "trial-")] == [1, 0]


def test_a_job_that_fails_stops_no_other():
    """One's model raises at its reference; another fits nowhere."""
    executor = tables("good", "small")
    broken = Failed(message="ValueError: broken", traceback="Traceback…")
    executor.tables["bad"] = TableExecutor(facts(), [row(each.settings, outcome=broken) for each in table(facts())])
    jobs = write(bad={"task": "bad.py"}, small={"task": "small.py", "budget": f"{MIB}"}, good={"task": "good.py"})
    batch, _ = run(executor, jobs)
    assert states(batch) == {"bad": "failed", "small": "nothing fits", "good": "done"}
    rows = {each["name"]: each for each in yaml.safe_load(Path("plans/summary.yaml").read_text())["jobs"]}
    assert "ValueError: broken" in rows["bad"]["why"]


def test_a_batch_that_was_stopped_goes_on_where_it_was():
    """No trial is measured twice, and a job that is done is left alone."""
    jobs = write(first={"task": "one.py", "trials": 4, "sampler": "random", "priority": 5}, second={"task": "two.py"})
    begun = tables("one", "two")
    batch, _ = run(begun, jobs, stop_after=3)
    assert "interrupted" in states(batch).values()
    later = tables("one", "two")
    resumed, _ = run(later, jobs, resume=True)
    assert states(resumed) == {"first": "done", "second": "done"}
    for task in ("one.py", "two.py"):
        trials = [each.plan.settings.canonical() for tab in (begun, later) for each in tab.measured("trial-", task)]
        assert len(trials) == len(set(trials))
    nothing = tables("one", "two")
    done_already, _ = run(nothing, jobs, resume=True)
    assert nothing.requests == []
    assert {job.job.name: job.plan for job in done_already.jobs} == {job.job.name: job.plan for job in resumed.jobs}


def test_speed_and_peak_of_the_table_are_what_the_plan_says():
    """By arithmetic: the fastest that fits 400 MiB."""
    run(tables("model"), write(job={"budget": TIGHT}))
    plan = load_plan("plans/job.yaml")
    fitting = [each.settings for each in table(facts(), SPACE) if peak(each.settings) * 1.03 <= 400 * MIB]
    assert plan.measured.samples_per_s.value >= 0.98 * max(map(speed, fitting))


def test_winners_of_one_task_are_measured_beside_one_reference():
    """Two rounds make a table's figures sure: two runs of the reference for both jobs, and two of each winner."""
    executor = tables("model")
    batch, _ = run(executor, write(loose={}, tight={"budget": TIGHT}))
    assert states(batch) == {"loose": "done", "tight": "done"}
    fresh = [each.plan.settings for each in executor.measured("finalist-") if each.fresh]
    winners = {job.plan.settings for job in batch.jobs}
    assert len(winners) == 2
    assert [fresh.count(REFERENCE), *(fresh.count(one) for one in winners)] == [2, 2, 2]
    assert all(job.plan.gain.rounds == 2 for job in batch.jobs)


def test_another_priority_does_not_wait_for_the_finalists():
    """What is urgent has its plan before the other job of its task runs any trial."""

    def is_tight(request: MeasureRequest) -> bool:
        return request.plan.budget.limit == 400 * MIB

    executor = tables("model")
    run(executor, write(later={"budget": TIGHT}, urgent={"priority": 2}))
    ids = [each.id for each in executor.requests]
    second = next(at for at, each in enumerate(executor.requests) if each.kind == "measure" and is_tight(each))
    assert any("finalist" in name for name in ids[:second])


def test_a_long_reason_gives_way_to_the_columns_on_a_narrow_terminal():
    """At 80 columns the reason is cut, and no other cell is. A share is told without what it is of."""
    batch, _ = run(tables("one"), write(first={"task": "one.py", "budget": MIDDLE}))
    batch.jobs[0].options = batch.jobs[0].options.model_copy(update={"budget": 1.2})
    batch.jobs[0].why = "a reason " * 20
    heading, row = printed(outcome_table(batch.jobs), 80).splitlines()
    assert heading.split() == ["job", "budget", "state", "trials", "known", "gain", "memory", "device", "time"]
    assert row.split()[:2] == ["first", "120%"]
    assert row.count("…") == 1
    assert row.rstrip().endswith("…")


def test_a_summary_that_is_none_is_refused():
    """With --resume, before anything runs."""
    jobs = write(job={})
    run(tables("model"), jobs)
    summary = Path("plans/summary.yaml")
    summary.write_text(re.sub(r"device_s: [0-9.]+", "device_s: abc", summary.read_text()))
    with pytest.raises(UserError, match=r"plans/summary\.yaml: no summary of a batch\. Move it aside, or leave out"):
        run(tables("model"), jobs, resume=True)


def test_jobs_of_one_task_inspect_it_once():
    executor = tables("one", "two")
    run(executor, write(a={"task": "one.py"}, b={"task": "one.py", "budget": TIGHT}, c={"task": "two.py"}))
    assert sorted(each.task for each in executor.requests if each.kind == "inspect") == [
        str(Path(name).resolve()) for name in ("one.py", "two.py")
    ]


def test_the_summary_says_how_busy_each_device_was():
    """A clock that a trial moves by one second: one device runs all, and is busy all the time."""
    executor = tables("model")
    now = [0.0]
    submit = executor.submit

    def named(request: TrialRequest) -> Any:
        now[0] += 1.0
        return done(submit(request).result().model_copy(update={"where": "node-1"}))

    executor.submit = named
    batch, _ = run(executor, write(job={}), clock=lambda: now[0])
    assert batch.devices() == [{"name": "node-1", "busy": 1.0, "runs": len(executor.requests)}]
    assert yaml.safe_load(Path("plans/summary.yaml").read_text())["devices"] == batch.devices()


def test_a_job_may_allow_its_quality_to_fall():
    """A half of the model pruned loses ten points, a quarter half of one. What was measured after ten steps of recovery
    serves no job that asks for twenty."""
    reference = Settings(batch=Micro(micro=64))
    known, rows = facts(evaluates=True), [row(reference, quality=(Quality(value=90.0, early=85.0),))]
    for ratio, value in ((0.25, 89.5), (0.5, 80.0)):
        cut = reference.model_copy(update={"pruning": Pruning(kind="structured", ratio=ratio)})
        quality = (Quality(value=value),)
        rows.append(row(cut, samples_per_s=(1000 * ratio,), peak_bytes=(100 * MIB,), quality=quality))
    Path("pruned.yaml").write_text(
        "schema: autotune/space@1\npruning: [{kind: structured, ratio: 0.25}, {kind: structured, ratio: 0.5}]\n"
    )
    asked = {"task": "one.py", "space": "pruned.yaml", "max_quality_drop": 1, "recovery_steps": 10}
    executor = Tables({"one": TableExecutor(known, rows)})
    batch, _ = run(executor, write(first=asked, longer={**asked, "recovery_steps": 20, "priority": 0.5}))
    assert states(batch) == {"first": "done", "longer": "done"}
    plans = [load_plan(f"plans/{name}.yaml") for name in ("first", "longer")]
    assert [plan.settings.pruning.ratio for plan in plans] == [0.25, 0.25]
    assert [plan.quality.samples for plan in plans] == [640, 1280]
    assert [plan.search.known for plan in plans] == [None, None]
