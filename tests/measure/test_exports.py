"""A plan's model as a file: what is written computes the same, for which batches, and what cannot be written."""

from __future__ import annotations

import importlib.util
import subprocess
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import autotune
from autotune.errors import PlanError, TaskError
from autotune.measure.exports.program import export
from autotune.measure.exports.reload import check
from autotune.measure.exports.types import ONNX_PACKAGES, ExportedFile, ExportOptions
from autotune.plan import Budget, Inference, Plan
from autotune.techniques import Settings
from autotune.techniques.allocator import Allocator
from autotune.techniques.batch import Batch
from autotune.techniques.compile import Compile
from autotune.techniques.data_loading import DataLoading
from autotune.techniques.memory_format import MemoryFormat
from autotune.techniques.precision import Precision
from autotune.techniques.quantization import Quantization

lacking = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
needs_onnx = pytest.mark.skipif(bool(lacking), reason=f"not installed: {', '.join(lacking)}")
slow_onnx = [pytest.mark.slow, needs_onnx]
Pair = namedtuple("Pair", "first second")

pytestmark = pytest.mark.medium


@dataclass
class Record:
    scores: torch.Tensor


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.ones(9, 64))


@pytest.fixture(autouse=True)
def read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is read back in this process: that another does is shown through the command line."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        file, kind, folder = command[4:]
        check(Path(file), kind, Path(folder))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("autotune.measure.exports.program.subprocess.run", run)


def plan(*settings: Any, batch: int = 8) -> Plan:
    chosen = Settings().having(Batch(micro=batch), *settings)
    return Plan(settings=chosen, inference=Inference(tolerance=0.05), budget=Budget(device="cpu"))


def task(infer: Any = lambda model, batch: model(batch), dataset: Any = None, model: Any = None) -> autotune.Task:
    def build() -> nn.Module:
        return model() if model is not None else nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    data = dataset if dataset is not None else list(torch.arange(20 * 64.0).reshape(20, 64).sin())
    return autotune.Task(build_model=build, build_dataset=lambda: data, infer=infer).for_inference()


def exported(folder: Path, job: autotune.Task, of: Plan | None = None, to: Any = "pt2") -> ExportedFile:
    return export(job, of or plan(), ExportOptions(to=to, file=str(folder / "file")), 0, lambda doing: None)


def test_a_file_computes_what_infer_does_for_batches_of_any_size(tmp_path):
    """Two whole batches of 8 of 20 samples, the last one of 4, and a single one; 5 are none of them."""
    found = exported(tmp_path, task())
    assert [run.num_samples for run in found.runs] == [8, 8, 4, 1]
    assert (found.sizes, found.refused) == ((8, 4, 1), ())
    assert max(max(run.from_plan, run.from_reference) for run in found.runs) < 1e-6
    assert found.num_bytes == (tmp_path / "file").stat().st_size
    with (tmp_path / "file").open("rb") as file:
        module = torch.export.load(file).module()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    x = torch.ones(5, 64)
    torch.testing.assert_close(module(x), model(x))


def test_a_plan_of_one_sample_is_tried_on_two(tmp_path):
    assert exported(tmp_path, task(), plan(batch=1)).sizes == (2, 1)


def test_a_batch_that_the_code_fixes_is_told(tmp_path):
    """``int`` of a size makes it a number."""
    found = exported(tmp_path, task(lambda model, batch: model(batch.view(int(batch.shape[0]) * 1, 64)) * len(batch)))
    assert (found.sizes, found.refused) == ((8,), (4, 1))
    assert all(run.refused for run in found.runs if run.num_samples != 8)


def test_an_iterable_dataset_gives_its_first_batches(tmp_path):
    assert [run.num_samples for run in exported(tmp_path, task(dataset=Stream())).runs][:2] == [8, 1]


@pytest.mark.parametrize(
    ("infer", "names"),
    [
        (lambda model, batch: {"logits": model(batch)}, ("logits",)),
        (lambda model, batch: (model(batch), batch), ("output_0", "output_1")),
        (lambda model, batch: Pair(model(batch), batch), ("output_0", "output_1")),
        (lambda model, batch: Record(model(batch)), ("scores",)),
        (lambda model, batch: {"batch": model(batch)}, ("output_batch",)),
    ],
    ids=["dict", "tuple", "namedtuple", "dataclass", "name of an input"],
)
def test_outputs_keep_their_names(tmp_path, infer, names):
    found = exported(tmp_path, task(infer))
    assert (found.inputs, found.outputs) == (("batch",), names)


def test_a_batch_is_given_to_infer_as_the_loader_makes_it(tmp_path):
    """A dataclass here; the file takes its tensors by name."""
    job = task(lambda model, batch: model(batch.scores))
    found = exported(tmp_path, autotune.Task(**{**vars_of(job), "collate": lambda some: Record(torch.stack(some))}))
    assert found.inputs == ("scores",)


def vars_of(job: autotune.Task) -> dict[str, Any]:
    return {"build_model": job.build_model, "build_dataset": job.build_dataset, "infer": job.infer, "infers": True,
            "compute_loss": job.infer}  # fmt: skip


def test_a_dimension_that_differs_between_batches_is_left_open(tmp_path):
    """Rows of 64 and of 128 numbers, of which infer takes the mean."""
    data = [torch.ones(64 + 64 * (number >= 8)) for number in range(16)]
    job = task(lambda model, batch: batch.mean(1), dataset=data)
    assert exported(tmp_path, job).sizes == (8, 4, 1)


@pytest.mark.parametrize("kind", [Precision(kind="bf16"), Quantization(kind="int8")])
def test_what_rounds_is_in_the_file(tmp_path, kind):
    """As far from the job as it stands as the plan is, and not from the plan."""
    found = exported(tmp_path, task(), plan(kind))
    assert found.sizes == (8, 4, 1)
    for run in found.runs:
        assert run.from_plan < 1e-6 < 1e-4 < run.from_reference < 0.05
        assert run.unlike is None


def test_outputs_beyond_the_tolerance_are_told(tmp_path):
    strict = plan(Quantization(kind="int8")).model_copy(update={"inference": Inference(tolerance=1e-6)})
    found = exported(tmp_path, task(), strict)
    assert {run.unlike is None for run in found.runs} == {False}
    assert found.runs[0].unlike.startswith("beside the reference's: its outputs differ by ")


def by_value(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch) if batch.sum() > 0 else batch


@pytest.mark.parametrize(
    ("infer", "said"),
    [
        (by_value, "torch.export cannot trace infer: "),
        (lambda model, batch: torch.from_numpy(batch.numpy()) + model(batch), "torch.export cannot trace infer: "),
        (lambda model, batch: {"logits": model(batch), "words": "none"}, "tensors alone, .* but infer holds str"),
        (lambda model, batch: (model(batch), None), "but infer holds NoneType"),
    ],
    ids=["value", "numpy", "text", "none"],
)
def test_what_no_file_holds_is_told_in_words(tmp_path, infer, said):
    with pytest.raises(TaskError, match=said):
        exported(tmp_path, task(infer))


def test_text_in_a_batch_is_told_in_words(tmp_path):
    data = [(torch.ones(64), "a word")] * 9
    with pytest.raises(TaskError, match="but a batch holds str"):
        exported(tmp_path, task(lambda model, batch: model(batch[0]), dataset=data))


def test_what_is_of_a_process_is_in_no_file():
    settings = plan(
        Compile(kind="model"), Allocator(kind="tcmalloc"), DataLoading(num_workers=1), Precision(kind="bf16"),
        MemoryFormat(kind="channels_last"),
    ).settings  # fmt: skip
    kept = {kind: [one.name for one in settings.in_file(kind).chosen()] for kind in ("pt2", "onnx")}
    assert kept == {"pt2": ["precision", "memory_format"], "onnx": ["precision"]}
    left_out = {one.name for one in settings.chosen() if one.not_in_file("pt2")}
    assert left_out == {"batch", "compile", "data_loading", "allocator"}


@pytest.mark.parametrize(
    "kind", [pytest.param(None, marks=slow_onnx), pytest.param(Quantization(kind="int8"), marks=slow_onnx)]
)
def test_onnxruntime_computes_the_same(tmp_path, kind):
    found = exported(tmp_path, task(lambda model, batch: {"logits": model(batch)}), plan(*filter(None, [kind])), "onnx")
    assert (found.sizes, found.refused, found.outputs) == ((8, 4, 1), (), ("logits",))
    assert max(run.from_plan for run in found.runs) < 0.01
    assert all(run.unlike is None for run in found.runs)


@pytest.mark.parametrize("kind", [pytest.param("bf16", marks=slow_onnx)])
def test_what_onnxruntime_does_not_run_is_told_in_words(tmp_path, kind):
    said = r"onnxruntime does not run it: (?s:.*)Of the plan it has: bf16. Use --to pt2"
    with pytest.raises(PlanError, match=said):
        exported(tmp_path, task(), plan(Precision(kind=kind)), "onnx")


def test_a_model_beyond_what_an_onnx_file_holds_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("autotune.measure.exports.program._MOST_BYTES", 1000)
    with pytest.raises(PlanError, match=r"at most 2 GiB, but the model has 33,280 bytes. Use --to pt2"):
        exported(tmp_path, task(), to="onnx")
