"""Each example: a search writes a plan, and the example's own script trains with it until it has learned."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import environment
from real_search import search_until_a_trial

from autotune import Plan, load_plan
from autotune.measure.device import inspect_device
from autotune.searches.options import SearchOptions
from autotune.techniques import Settings
from autotune.techniques.layers import Layers
from autotune.techniques.precision import Precision
from autotune.workers import Executor

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

# Enough training for the script's own bar, which it states with its reason, whichever plan the search found.
TRAINING = {
    "char_gpt": ["--steps", "400"],
    "digits_cnn": [],
    "adversarial_digits": ["--epochs", "4"],
    "style_transfer": ["--epochs", "1"],
    "frozen_backbone": ["--epochs", "3"],
}
SMALLER = {
    "char_gpt": {"WIDTH = 192": "WIDTH = 96", "NUM_BLOCKS = 4": "NUM_BLOCKS = 2"},
    "digits_cnn": {"SIDE = 32": "SIDE = 16"},
}
"""Half as wide and as deep, and of a quarter of the pixels, they pass the same bars in less time."""


def python(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    command_line = [sys.executable, *command]
    return subprocess.run(command_line, cwd=folder, env=environment(), capture_output=True, text=True, check=False)


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    done = python(folder, *command)
    assert done.returncode == 0, f"{' '.join(command)} left with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done


def a_copy_of(example: str, tmp_path: Path) -> Path:
    """Where a search may leave its study and its plan."""
    ignored = shutil.ignore_patterns(".autotune", "plan.yaml", "backbone.pt", "__pycache__")
    folder = Path(shutil.copytree(EXAMPLES / example, tmp_path / example, ignore=ignored))
    task = (folder / "model.py").read_text(encoding="utf-8")
    for size, smaller in SMALLER.get(example, {}).items():
        assert size in task
        task = task.replace(size, smaller)
    (folder / "model.py").write_text(task, encoding="utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("example", ["char_gpt", "digits_cnn"])
def test_a_search_writes_a_plan_with_which_it_learns(
    example: str, tmp_path: Path, local_executor: Executor, monkeypatch: pytest.MonkeyPatch
):
    """The first guess and the reference are compared, a plan is written, and training with it passes the bar."""
    folder = a_copy_of(example, tmp_path)
    monkeypatch.chdir(folder)
    search_until_a_trial(SearchOptions(task="model.py", trials=2, trial_time=0.2, device="cpu"), local_executor)
    plan = load_plan("plan.yaml")
    assert plan.measured is not None
    assert plan.gain is not None
    assert plan.gain.speed is not None
    learns(folder, example)


@pytest.mark.slow
@pytest.mark.parametrize("example", ["adversarial_digits", "style_transfer", "frozen_backbone"])
def test_what_is_frozen_learns_with_a_plan(example: str, tmp_path: Path):
    """An input or adapters train; in bf16 where the processor computes in it: elsewhere that takes minutes."""
    folder = a_copy_of(example, tmp_path)
    if example == "frozen_backbone":
        run(folder, "pretrain.py")
    precision = Precision(kind="bf16") if inspect_device("cpu").bf16 else Precision()
    settings = Settings(precision=precision, layers=Layers(kind="exact"))
    (folder / "plan.yaml").write_text(Plan(settings=settings).to_yaml())
    learns(folder, example)


def learns(folder: Path, example: str) -> None:
    """The example's own script passes its bar with the plan in its folder."""
    trained = run(folder, "-m", "autotune", "run", "plan.yaml", "--", sys.executable, "train.py", *TRAINING[example])
    assert "%" in trained.stdout or "loss" in trained.stdout


@pytest.mark.slow
def test_a_script_trains_without_a_plan_too(tmp_path: Path):
    """What the reference is: the user's job as it stands."""
    run(a_copy_of("digits_cnn", tmp_path), "train.py")


@pytest.mark.slow
def test_too_little_training_is_said(tmp_path: Path):
    """The bar can be missed: a script whose check cannot fail would prove nothing."""
    done = python(a_copy_of("adversarial_digits", tmp_path), "train.py", "--epochs", "0")
    assert done.returncode == 1
    assert "70% or more was expected" in done.stderr


@pytest.mark.slow
def test_a_backbone_that_is_not_there_is_told_with_the_command(tmp_path: Path):
    done = python(a_copy_of("frozen_backbone", tmp_path), "train.py")
    assert done.returncode == 1
    assert "run `python pretrain.py` first" in done.stderr


@pytest.mark.parametrize("example", TRAINING)
def test_a_task_file_does_not_import_this_package(example: str):
    tree = ast.parse((EXAMPLES / example / "model.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports for alias in node.names} | {
        getattr(node, "module", None) for node in imports
    }
    assert not any(name and name.split(".")[0] == "autotune" for name in names)
