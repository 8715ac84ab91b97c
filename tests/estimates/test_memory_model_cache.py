"""Memory models that are kept: found again where nothing has changed, and traced where anything has."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.estimates import memory_model as memory_model_module
from autotune.estimates.memory_model import MemoryModel, fit_memory_model
from autotune.estimates.memory_model_cache import MemoryModelCache
from autotune.estimates.memory_model_file import StoredModel, load_memory_model, packed
from autotune.estimates.tracing.fake_step import FakeTraining, Untraceable
from autotune.plan import Budget, Plan
from autotune.task_file import load_task
from autotune.techniques import Settings
from autotune.testing.zoo import ZOO

MODEL = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())

def build_dataset():
    return list(torch.randn(16, 4))

def compute_loss(model, batch):
    return model(batch).mean()
"""


@pytest.fixture
def task_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "kept_model.py"
    path.write_text(MODEL)
    return path


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A row for each fake training that is opened."""
    opened: list[Any] = []

    class Counted(FakeTraining):
        def __init__(self, *args: Any) -> None:
            opened.append(args)
            super().__init__(*args)

    monkeypatch.setattr(memory_model_module, "FakeTraining", Counted)
    return opened


def plan(**settings: Any) -> Plan:
    return Plan(settings=Settings.model_validate(settings), budget=Budget(device="cpu"))


def memory_model(path: Path, accumulates: bool = False, few: int | None = None, **settings: Any) -> MemoryModel:
    """As a process of its own would find it."""
    return MemoryModelCache(load_task(str(path)), None, "cpu").of(plan(**settings), accumulates, few)


def files() -> list[Path]:
    return sorted(Path(".autotune/memory_models").iterdir())


EXACT = {"layers": {"kind": "exact"}, "precision": {"kind": "bf16"}}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), [("gpt", {}), ("resnet", EXACT), ("token_loss", EXACT)])
def test_what_is_kept_of_a_memory_model_is_the_memory_model(name: str, settings: Any, tmp_path: Path):
    found = fit_memory_model(plan(**settings), ZOO[name], accumulates=True)
    steps = [replace(step, possible_bytes=step.trace.num_moments) for step in found.steps]
    kept = StoredModel(found.batches, dict(zip(found.batches, steps, strict=True)), {"model.py": "1"})
    path = tmp_path / "kept"
    path.write_bytes(packed("key", kept))
    assert load_memory_model(path, "key") == kept
    assert load_memory_model(path, "another") is None


@pytest.mark.medium
def test_a_memory_model_is_traced_once(task_file: Path, traced: list[Any]):
    """Allocators, workers and batches have none of their own; accumulation and techniques do."""
    first = memory_model(task_file)
    second = memory_model(
        task_file, allocator={"kind": "tcmalloc"}, batch={"micro": 7}, data_loading={"num_workers": 2}
    )
    assert len(traced) == 1
    assert [second.peak_bytes(micro) for micro in (2, 7, 300)] == [first.peak_bytes(micro) for micro in (2, 7, 300)]
    assert (second.at(7), second.work(7)) == (first.at(7), first.work(7))
    memory_model(task_file, accumulates=True)
    memory_model(task_file, precision={"kind": "bf16"})
    assert len(traced) == len(files()) == 3


def test_a_batch_that_is_traced_by_itself_is_kept_too(task_file: Path, traced: list[Any]):
    """As is that it cannot be: BatchNorm wants two values."""
    for _ in range(2):
        with pytest.raises(Untraceable, match="more than 1 value"):
            memory_model(task_file).peak_bytes(1)
    task_file.write_text(MODEL.replace("nn.BatchNorm1d(8)", "nn.Tanh()"))
    assert memory_model(task_file).peak_bytes(1) == memory_model(task_file).peak_bytes(1)
    assert len(traced) == 2


@pytest.mark.medium
def test_what_few_batches_have_shown_is_kept_until_more_are_asked_for(task_file: Path, traced: list[Any]):
    """One file has all of them, and one memory model serves both once it is there."""
    peaks = [memory_model(task_file, few=micro).peak_bytes(micro) for micro in (7, 7, 300)]
    assert len(traced) == 2
    assert [memory_model(task_file).peak_bytes(micro) for micro in (7, 7, 300)] == peaks
    assert not memory_model(task_file, few=40).is_traced_at_each_batch
    assert len(traced) == 3
    assert len(files()) == 1


def test_a_batch_that_cannot_be_traced_is_said_at_once_and_kept(task_file: Path, traced: list[Any]):
    memory_model(task_file, few=7)
    for _ in range(2):
        with pytest.raises(Untraceable, match="more than 1 value"):
            memory_model(task_file, few=1)
    assert len(traced) == 2


@pytest.mark.medium
@pytest.mark.parametrize("where", ["task", "beside", "late"])
def test_a_file_that_was_edited_is_traced_again(where: str, task_file: Path, traced: list[Any]):
    """The task's own, one that it imports, or one that only its loss does; what was kept gives way."""
    edited = task_file
    if where != "task":
        edited = task_file.with_name(f"kept_{where}.py")
        edited.write_text("WIDTH = 4\n")
        late = MODEL.replace("    return model(batch)", f"    import kept_{where}\n    return model(batch)")
        task_file.write_text(late if where == "late" else f"import kept_{where}\n{MODEL}")
    memory_model(task_file)
    edited.write_text(f"{edited.read_text()}# edited\n")
    memory_model(task_file)
    memory_model(task_file)
    assert len(traced) == 2
    assert len(files()) == 1


def test_other_weights_are_traced_again(task_file: Path, traced: list[Any]):
    """What is cut from them may differ."""
    task_file.write_text(f"{MODEL}\nweights = 'kept.pt'\n")
    for content in ("first", "first", "second"):
        task_file.with_name("kept.pt").write_text(content)
        memory_model(task_file)
    assert len(traced) == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: b"",
        lambda content: b"no gzip",
        lambda content: content[:-20],
        lambda content: content[:99] + b"no gzip" + content[106:],
        lambda content: gzip.compress(b'{"key": []}'),
    ],
    ids=["empty", "other", "cut", "changed", "another"],
)
def test_a_corrupt_file_is_ignored_and_written_anew(
    spoil: Callable[[bytes], bytes], task_file: Path, traced: list[Any]
):
    memory_model(task_file)
    (path,) = files()
    before = path.read_bytes()
    path.write_bytes(spoil(before))
    memory_model(task_file)
    assert len(traced) == 2
    assert path.read_bytes() == before


def test_where_nothing_can_be_written_nothing_is_kept(task_file: Path, traced: list[Any]):
    Path(".autotune").write_text("in the way")
    memory_model(task_file)
    memory_model(task_file)
    assert len(traced) == 2


def test_a_task_without_a_file_is_traced_each_time(task_file: Path, traced: list[Any]):
    for _ in range(2):
        MemoryModelCache(ZOO["mlp"], None, "cpu").of(plan(), accumulates=False)
    assert len(traced) == 2
    assert os.listdir() == ["kept_model.py"]
