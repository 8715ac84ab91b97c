"""A search's options: each is declared once, and everything that asks for a search offers it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from pydantic import ValidationError
from search_tables import facts

from autotune.batch.jobs import Job
from autotune.cli.app import app
from autotune.plan import Budget
from autotune.searches.options import NOT_SUBMITTED, Drop, HowToSearch, SearchOptions, Shown, option_name
from autotune.searches.store.record import StudyRecord, check_same
from autotune.service.spec import SearchSpec, arguments

OTHERS: dict[str, Any] = {
    "seed": 3,
    "effective_batch": 32,
    "allow_split": True,
    "inference": True,
    "tolerance": 0.2,
    "life": True,
    "max_quality_drop": "1.5%",
    "recovery_steps": 7,
    "recovery_lr": 0.5,
    "distill": True,
    "keep_weights": True,
    "budget": "90%",
    "margin": 0.05,
    "max_latency": "20ms",
    "host_budget": "16GiB",
    "trials": 7,
    "max_time": "20m",
    "trial_time": "2s",
    "space": "exact",
    "sampler": "tpe",
    "flags": "off",
    "scratch": "empty",
    "fresh": True,
    "ablate": True,
}
"""Each option, as it is written, with another value than its default."""
OF_INFERENCE = ("tolerance", "max_latency")


def shown() -> Iterator[str]:
    for name, field in HowToSearch.model_fields.items():
        if any(isinstance(one, Shown) for one in field.metadata) and field.description:
            yield name


def test_each_option_says_how_it_is_shown_and_what_it_is():
    assert [*shown()] == [*HowToSearch.model_fields] == [*OTHERS]


@pytest.mark.parametrize("command", ["search", "submit"])
def test_the_command_line_offers_each(command, here, tmp_path):
    offered = here(command, "--help", cwd=tmp_path).stdout
    left_out = NOT_SUBMITTED if command == "submit" else ()
    assert [name for name in OTHERS if option_name(name) not in offered] == [*left_out]


def job_with(name: str) -> dict[str, Any]:
    """A script, where the option is of scripts alone; inference, where it is of that."""
    if name in OF_INFERENCE:
        return {"task": "model.py", "inference": True}
    return {"command": [sys.executable, "train.py"]} if name in ("flags", "scratch") else {"task": "model.py"}


@pytest.mark.parametrize("name", OTHERS)
def test_a_batch_takes_each_and_hands_it_on(name, tmp_path):
    job = Job(name="one", **job_with(name), **{name: OTHERS[name]})
    options = job.options(tmp_path, "cpu", False)
    assert getattr(options, name) == getattr(job, name) != HowToSearch.model_fields[name].default
    assert options.given(OTHERS) == [*(["--inference"] if name in OF_INFERENCE else []), option_name(name)]


@pytest.mark.parametrize("name", [name for name in OTHERS if name not in NOT_SUBMITTED])
def test_a_service_takes_each_and_writes_it_as_the_command_line_reads_it(name, tmp_path):
    """Its database has it as text, too."""
    spec = SearchSpec(**job_with(name), archive="0" * 64, **{name: OTHERS[name]})
    words = arguments(SearchSpec.model_validate_json(spec.model_dump_json()), tmp_path)
    word, *job = words[1:] if name in OF_INFERENCE else words
    assert words[:1] == ["--inference"] or name not in OF_INFERENCE
    assert job in (["--", sys.executable, "train.py"], [str(tmp_path / "model.py")])
    option, _, text = word.partition("=")
    assert option == option_name(name)
    assert getattr(HowToSearch(**{name: text or True}), name) == getattr(spec, name)


@pytest.mark.parametrize("name", NOT_SUBMITTED)
def test_a_service_gives_back_no_weights(name):
    with pytest.raises(ValidationError, match=f"no weights: leave out --{name.replace('_', '-')}"):
        SearchSpec(task="model.py", archive="0" * 64, **{name: True})


def test_what_is_asked_for_reads_back_as_the_same():
    options = SearchOptions(task="model.py", **OTHERS)
    assert SearchOptions(task="model.py", **options.asked()) == options
    assert options.budget == 0.9
    assert options.max_time == 1200.0
    assert options.max_quality_drop == Drop(0.015, is_share=True)


def record(**options: Any) -> StudyRecord:
    stated = {"task": "model.py", "fingerprint": "a" * 64, "budget": Budget(), "space": {}, "facts": facts()}
    return StudyRecord(**stated, **options)


def test_a_study_of_another_quality_does_not_go_on():
    before, now = (record(max_quality_drop="1%", recovery_steps=steps) for steps in (100, 200))
    with pytest.raises(Exception, match="--recovery-steps was 100, but is 200"):
        check_same("one", before, now)


def test_where_no_quality_is_judged_a_study_depends_on_none_of_its_options():
    """Earlier studies kept 0 steps there."""
    kept = record().model_dump(mode="json") | {"recovery_steps": 0}
    check_same("one", StudyRecord.model_validate(kept), record(recovery_steps=7))


def test_what_is_decided_unless_said_can_be_turned_off(tmp_path):
    """``life`` is None, yes or no: a service writes the last as ``--no-life``."""
    spec = SearchSpec(task="model.py", archive="0" * 64, life=False)
    assert arguments(spec, tmp_path)[0] == "--no-life"
    context = typer.main.get_command(app).commands["search"].make_context("search", ["model.py", "--no-life"])
    assert context.params["life"] is False
