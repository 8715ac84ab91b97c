"""``autotune search --devices``: a plan and a share for each of two unlike devices, from one command."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import start
from ray_node import TOKEN, another_node, on_one_processor
from search_tables import MIB, facts, options, row, speed

import autotune
from autotune.bundle import device_name
from autotune.commands.devices.search import search_types
from autotune.commands.devices.types import UnlikeType, split_devices
from autotune.errors import NothingFits, UserError
from autotune.workers import MeasureRequest, Outcome, TrialRequest
from autotune.workers.table import TableExecutor

ONCE = (
    sys.executable,
    "-P",
    "-c",
    "from autotune.searches.winner import finalists; from autotune.commands import verify; "
    "finalists.MOST_ROUNDS = verify.NUM_REPEATS = 1; from autotune.cli import main; main()",
)
"""``autotune``, with finalists and shares that run once in fresh interpreters."""
FAST, SLOW = UnlikeType("cpu:4 processors"), UnlikeType("cpu:2 processors")
TASK = "def build_model(): ...\ndef build_dataset(): ...\ndef compute_loss(model, batch): ...\n"


class OnPaper(TableExecutor):
    """A device some times slower than the tables', which knows every batch."""

    def __init__(self, slower: int, **known: Any) -> None:
        found = facts(num_threads=4 // slower, **known)
        found = found.model_copy(update={"device": found.device.model_copy(update={"name": device_name("cpu")})})
        super().__init__(found, ())
        self.device_type, self._slower = f"A CPU, {4 // slower} processors", slower
        self.interrupts_at: str | None = None
        self.fresh_peak_bytes: int | None = None
        self._closed = threading.Event()

    def close(self) -> None:
        super().close()
        self._closed.set()

    def measured(self, prefix: str) -> list[TrialRequest]:
        """Requests whose name begins so."""
        return [one for one in self.requests if one.id.startswith(prefix)]

    def _answer(self, request: TrialRequest) -> Outcome:
        if request.id == self.interrupts_at:
            os.kill(os.getpid(), signal.SIGTERM)  # Ctrl-C may be ignored in the background
            self._closed.wait()
        outcome = super()._answer(request)
        if not isinstance(request, MeasureRequest) or self._is_closed:
            return outcome
        changes: dict[str, Any] = {"samples_per_s": (speed(request.applied) / self._slower,)}
        if request.id.startswith("verify"):
            changes["disturbed"] = (0.5,)  # which keeps no share from being kept
            if self.fresh_peak_bytes is not None:
                changes["peak_bytes"] = (self.fresh_peak_bytes,)
        return row(request.applied, **changes).outcome_at(0)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(TASK)


def devices(**known: Any) -> dict[str, OnPaper]:
    return {FAST.device: OnPaper(1, **known), SLOW.device: OnPaper(2, **known)}


def search(found: Mapping[str, OnPaper], *types: UnlikeType, dry_run: bool = False, **changes: Any) -> int:
    """The exit code."""
    asked = options(output=Path("both"), **{"trials": 12, **changes})
    return search_types(asked, types or (FAST, SLOW), found, dry_run, json=True)


def asked_of(found: Mapping[str, OnPaper]) -> set[str]:
    """The kinds of requests that both have had."""
    return {one.kind for each in found.values() for one in each.requests}


def shares() -> list[dict[str, Any]]:
    return yaml.safe_load(Path("both/bundle.yaml").read_text())["plans"]


@pytest.mark.medium
def test_one_command_gives_each_type_a_plan_and_a_share(monkeypatch, capsys):
    """Of 64 samples, what two ranks take of which the second is half as fast, each share measured by itself: the first
    to finish does so within a sample's time of the last. A resume measures nothing; with other ranks, shares alone."""
    found = devices()
    assert search(found) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["path"] == "both"
    assert [one["state"] for one in document["jobs"]] == ["done", "done"]
    fast, slow = shares()
    assert fast["samples"] + slow["samples"] == 64
    assert abs(fast["step_s"] - slow["step_s"]) <= max(one["step_s"] / one["samples"] for one in (fast, slow))
    for threads, one in ((4, fast), (2, slow)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        plan = autotune.load_plan("both")
        assert plan.settings.batch.num_samples == one["samples"]
        assert "one process alone took" in plan.notes[0]

    same = devices()
    assert search(same, resume=True) == 0
    assert (asked_of(same), shares()) == ({"inspect"}, [fast, slow])
    assert ", known)" in capsys.readouterr().err

    again = devices()
    assert search(again, FAST, UnlikeType(SLOW.device, ranks=2), resume=True) == 0
    assert [one.measured(kind) for one in again.values() for kind in ("trial", "finalist")] == [[]] * 4
    assert all(one.measured("verify") for one in again.values())
    fast, slow = shares()
    assert fast["samples"] + 2 * slow["samples"] == 64
    assert slow["ranks"] == 2


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "--allow-split permits it": ({"split_error": 0.2}, {}),
    "an iterable dataset": ({"dataset_kind": "iterable", "dataset_length": None}, {}),
    "Give --effective-batch": ({"effective_batch_held": False, "effective_batch_assumed": True}, {}),
    "by 2 ranks or more, each with one or more, but got 65": ({}, {"ranks": 64}),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_shared_is_refused_before_anything_is_measured(said):
    known, asked = REFUSED[said]
    found = devices(**known)
    with pytest.raises(UserError, match=re.escape(said)):
        search(found, FAST, UnlikeType(SLOW.device, **asked))
    assert asked_of(found) == {"inspect"}
    assert not Path("both").exists()


def test_devices_that_no_process_could_tell_apart_are_refused_before_anything_is_measured():
    found = {FAST.device: OnPaper(1), SLOW.device: OnPaper(1)}
    found[SLOW.device].device_type = "A CPU, more memory"
    with pytest.raises(UserError, match=r"two rows are of one device, .* \(64 GiB, 4 threads\), and no process could"):
        search(found)
    assert asked_of(found) == {"inspect"}


@pytest.mark.medium
def test_a_type_without_a_plan_leaves_the_folder_as_it_was(capsys):
    """Its budget is its own: the other type has no limit, and its plan. With more, it is searched again by what is
    known, and the other type is left alone."""
    earlier = Path("both/bundle.yaml")
    earlier.parent.mkdir()
    earlier.write_text("another's")
    assert search(devices(), FAST, UnlikeType(SLOW.device, budget=f"{100 * MIB}")) == 3
    said = capsys.readouterr().err
    assert f"a plan for each type, and there is none for {SLOW.device}. What was measured is kept." in said
    assert f"behind the type, {SLOW.device}=SIZE, and --resume" in said
    assert f"{earlier} is of an earlier search" in said
    assert Path("both/searches/cpu-4-processors.yaml").exists()
    assert earlier.read_text() == "another's"
    more = devices()
    assert search(more, FAST, UnlikeType(SLOW.device, budget="2GiB"), resume=True) == 0
    assert not more[FAST.device].measured("trial")
    assert len(more[SLOW.device].measured("canary")) == 1
    assert sum(one["samples"] for one in shares()) == 64


def test_a_budget_that_one_type_cannot_hold_is_refused_before_anything_is_measured():
    found = devices(process_bytes=200 * MIB)
    with pytest.raises(UserError, match=f"{SLOW.device}: --budget 100 MiB: a process is charged 200 MiB before"):
        search(found, FAST, UnlikeType(SLOW.device, budget=f"{100 * MIB}"))
    assert asked_of(found) == {"inspect"}


@pytest.mark.medium
def test_a_share_over_the_budget_is_said(capsys):
    """What its trials took was within it."""
    found = devices()
    found[SLOW.device].fresh_peak_bytes = 2**34
    with pytest.raises(NothingFits, match=r"a share of \d+ samples is over the budget, although its micro-batch of"):
        search(found, budget=2**32)
    assert "samples over the budget (" in capsys.readouterr().err


@pytest.mark.medium
def test_an_interrupt_while_shares_are_measured_leaves_those_of_the_trials(capsys):
    """What was measured of the shares is kept: a resume measures the rest."""
    found = devices()
    found[FAST.device].interrupts_at = "verify-3"
    assert search(found) == 130
    assert sum(one["samples"] for one in shares()) == 64
    assert "was measured alone, in study" in yaml.safe_load(Path("both", shares()[0]["plan"]).read_text())["notes"][0]
    assert "Interrupted: the shares go by the searches' trials." in capsys.readouterr().err
    again = devices()
    assert search(again, resume=True) == 0
    assert again[FAST.device].measured("verify")[0].id == "verify-3"


def test_a_dry_run_says_what_would_be_done(capsys):
    """Nothing is measured, and nothing written; what the searches have measured is known to the next."""
    found = devices()
    assert search(found, dry_run=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["effective"], document["ranks"]) == (64, {FAST.device: 1, SLOW.device: 1})
    assert [one["name"] for one in document["jobs"]] == ["cpu-4-processors", "cpu-2-processors"]
    assert all(one["configurations"] > 12 and not one["known"] for one in document["jobs"])
    assert asked_of(found) == {"inspect"}
    assert not Path("both").exists()
    assert search_types(options(output=Path("both")), (FAST, SLOW), devices(), dry_run=True, json=False) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "shares of 64 samples for 2 processes (1 x cpu:4 processors, 1 x cpu:2 processors) are measured" in said


def test_two_names_of_one_type_are_refused():
    executor = OnPaper(1)
    with pytest.raises(UserError, match="cpu:4 processors and cpu:2 processors mean one type, A CPU, 4 processors"):
        search({FAST.device: executor, SLOW.device: executor})


def test_types_are_named_with_ranks_and_budgets():
    """A type's own name may have a comma."""
    found = split_devices("cuda:A100-SXM4-80GB, 80 GiB*2=70GiB, cuda:T4 * 4 = 90%,cuda:L4")
    assert found == (
        UnlikeType("cuda:A100-SXM4-80GB, 80 GiB", 2, "70GiB"),
        UnlikeType("cuda:T4", 4, "90%"),
        UnlikeType("cuda:L4"),
    )
    assert split_devices("all") == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cuda:A100,cuda:a100*2", "cuda-a100 is named twice"),
        ("cuda:A100*2", "one type alone shares with none"),
        ("cuda:A100,cpu", "different backends"),
        ("cuda:A100*0,cuda:T4", "a type of device was expected"),
        ("cuda:A100=8,cuda:T4", "Was 8GiB meant"),
        ("tpu,cuda:T4", "cpu or cuda was expected"),
        ("", "a type of device was expected"),
    ],
)
def test_other_devices_are_refused(text, said):
    with pytest.raises(UserError, match=said):
        split_devices(text)


COMMANDS = {
    "there is one type alone": ("--devices", "cpu", "--executor", "local"),
    "--devices cannot be had with --storage, --ablate": ("--devices", "cpu", "--ablate", "--storage", "sqlite:///a.db"),
    "--device is of one type": ("--devices", "cpu", "--device", "cpu"),
    "model.py: a folder was expected for the bundle": ("--devices", "cpu", "-o", "model.py"),
    "neither a file nor a preset": ("--devices", "cpu", "--space", "nothing.yaml"),
}


@pytest.mark.parametrize("said", COMMANDS)
def test_a_command_that_cannot_be_is_refused(here, tmp_path, said):
    ended = here("search", "model.py", *COMMANDS[said], cwd=tmp_path)
    assert ended.returncode == 2
    assert said in ended.stderr


@pytest.mark.medium
def test_a_device_that_is_not_there_is_refused_with_what_there_is(tmp_path):
    """Before anything runs."""
    asked = ("--devices", "cpu:abacus,cpu:quipu", "--executor", "local")
    ended = start("search", "model.py", *asked, cwd=tmp_path).finish()
    assert (ended.returncode, ended.left_behind) == (2, [])
    assert "device cpu:abacus: there is no such device. There are: 1 x" in ended.stderr


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor cannot be two unlike CPUs")
def test_two_nodes_of_unlike_cpus_share_one_training(ray_executor, tmp_path, monkeypatch):
    """Two nodes on this machine, of which one may use a single processor: all that there are, each with its threads."""
    shutil.copy(Path(__file__).parents[1] / "tasks" / "healthy.py", tmp_path)
    (tmp_path / "space.yaml").write_text("schema: autotune/space@1\nprecision: auto\n")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    fast = ("--space", "space.yaml", "--sampler", "random", "--trials", "2", "--trial-time", "0.2s")
    with another_node(ray_executor.address, tmp_path / "node.log", on_one_processor):
        where = ("--devices", "cpu", "--address", ray_executor.address)
        running = start("search", "healthy.py", *fast, *where, cwd=tmp_path, program=ONCE, **TOKEN)
        ended = running.finish(timeout_s=500)
    assert (ended.returncode, ended.stdout) == (0, "bundle\n"), ended.stderr
    rows = yaml.safe_load((tmp_path / "bundle" / "bundle.yaml").read_text())["plans"]
    assert rows[0]["threads"] == 1 < rows[1]["threads"]
    assert sum(one["samples"] for one in rows) == 8
    assert all((tmp_path / "bundle" / one["plan"]).exists() for one in rows)
    assert "8 samples an optimizer step, expected in" in ended.stderr
    assert "2 jobs on 2 devices (cpu:1 processor, cpu:" in ended.stderr
    assert "1 thread): " in ended.stderr
