"""Searches, verifications and estimates from Python."""

from __future__ import annotations

import builtins
import signal
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import autotune
from autotune.commands.starter import write_starter
from autotune.errors import NothingFits, UserError

SHORT = {"executor": "local", "device": "cpu", "trials": 2, "trial_time": "0.2s", "space": "space.yaml"}


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    write_starter(tmp_path / "model.py")
    (tmp_path / "space.yaml").write_text("schema: autotune/space@1\nprecision: auto\n")
    monkeypatch.chdir(tmp_path)
    return "model.py"


@pytest.mark.slow
def test_a_search_returns_the_plan_that_it_wrote_and_prints_nothing(task, one_round, capfd):
    """Its signals are as they were; and what it returns is verified as it stands."""
    before = signal.getsignal(signal.SIGINT)
    plan = autotune.search(task, budget="8GiB", output="found.yaml", measurements="sqlite:///kept.db", **SHORT)
    assert plan == autotune.load_plan("found.yaml")
    assert Path("kept.db").is_file()  # and not where they are kept by default
    assert not Path(".autotune/results.db").exists()
    assert plan.budget.limit == 8 * 2**30
    assert autotune.verify(plan, task, executor="local", trial_time="0.2s").holds
    assert signal.getsignal(signal.SIGINT) == before
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_in_a_notebook_each_thing_that_happens_is_a_line(task, one_round, monkeypatch):
    """As IPython's kernel says that it is one, and takes what is displayed."""
    shell = type("ZMQInteractiveShell", (), {})()
    display = types.ModuleType("IPython.display")
    shown: list[str] = []
    display.display = lambda what: shown.append(what.text.rstrip())
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    autotune.search(task, **SHORT)
    assert shown[0].endswith("reading the task: model.py")
    assert any("] reference: " in line for line in shown)
    assert "\n" not in "".join(shown)


@pytest.mark.slow
def test_a_plan_file_is_verified_with_the_task_beside_it_from_any_thread(task, one_round):
    """Only the main thread is told of a Ctrl-C."""
    autotune.search(task, **SHORT)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(autotune.verify, "plan.yaml", executor="local", trial_time="0.2s").result()
    assert found.holds


@pytest.mark.slow
def test_an_estimate_is_the_commands(task):
    found = autotune.estimate(task, budget="8GiB", device="cpu", space="space.yaml")
    assert found.limit_bytes == 8 * 2**30
    assert found.base.micro is not None
    with pytest.raises(NothingFits):
        autotune.estimate(task, budget="1MiB", device="cpu", space="space.yaml")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budgets": "8GiB"}, "budgets: unknown key. Use one of: seed, effective_batch"),
        ({"budget": "8"}, "budget: a budget of 8 is 8 bytes. Was 8GiB meant?"),
        ({"max_time": "soon"}, "max_time: not a duration: 'soon'"),
        ({"device": "tpu"}, "device: cpu or cuda was expected"),
        ({"sampler": "grid"}, "sampler: "),
    ],
)
def test_what_is_no_option_or_no_value_is_said_before_anything_runs(options, said):
    with pytest.raises(UserError, match=said):
        autotune.search("model.py", executor="local", **options)


@pytest.mark.parametrize("option", [{"flags": "off"}, {"scratch": "copy"}])
def test_options_of_scripts_are_refused_for_a_task(task, option):
    with pytest.raises(UserError, match="is for a script's"):
        autotune.search(task, executor="local", **option)


def test_a_size_that_is_none_is_said():
    with pytest.raises(UserError, match="device_memory: not a size: 'much'"):
        autotune.estimate("model.py", device_memory="much")
