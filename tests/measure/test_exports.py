"""A plan's model as a file: what is written computes the same, for which batches, and what cannot be written."""

from __future__ import annotations

import importlib.util
import subprocess
from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import IterableDataset

import autotune
from autotune.errors import PlanError, TaskError
from autotune.measure.exports.program import export
from autotune.measure.exports.reload import check
from autotune.measure.exports.types import ONNX_PACKAGES, Dimension, ExportedFile, ExportOptions, most_from_plan
from autotune.plan import Budget, Inference, Plan
from autotune.report.doctor import _advice
from autotune.report.export import as_json, explain
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


class Empty(IterableDataset):
    def __iter__(self) -> Any:
        return iter(())


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
    assert [run.num_samples for run in found.runs] == [8, 8, 4, 1, 8]
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
    assert (found.sizes, [run.shapes for run in found.refused]) == ((8,), [((4, 64),), ((1, 64),)])
    assert found.shapes == ((Dimension(least=8, most=8), Dimension(least=64, most=64)),)


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
        (lambda model, batch: {"a.b": model(batch), "a_b": batch, "a-b": batch}, ("a_b", "output_a_b", "output_a_b_2")),
    ],
    ids=["dict", "tuple", "namedtuple", "dataclass", "name of an input", "alike"],
)
def test_outputs_keep_their_names(tmp_path, infer, names):
    found = exported(tmp_path, task(infer))
    assert (found.inputs, found.outputs) == (("batch",), names)


def test_a_batch_is_given_to_infer_as_the_loader_makes_it(tmp_path):
    """A dataclass here; the file takes its tensors by name."""
    job = task(lambda model, batch: model(batch.scores))
    found = exported(tmp_path, autotune.Task(**{**vars_of(job), "collate": lambda some: Record(torch.stack(some))}))
    assert (found.inputs, found.given) == (("scores",), "{'scores': scores}")


def vars_of(job: autotune.Task) -> dict[str, Any]:
    return {"build_model": job.build_model, "build_dataset": job.build_dataset, "infer": job.infer, "infers": True,
            "compute_loss": job.infer}  # fmt: skip


def test_a_dimension_that_differs_between_batches_is_left_open(tmp_path):
    """Rows of 64 and of 128 numbers, of which infer takes the mean."""
    data = [torch.ones(64 + 64 * (number >= 8)) for number in range(16)]
    found = exported(tmp_path, task(lambda model, batch: batch.mean(1), dataset=data))
    assert (found.sizes, found.shapes) == ((8, 4, 1), ((Dimension(), Dimension()),))


def twice_above(most: int) -> Any:
    return lambda model, batch: batch * 2 if batch.shape[0] > most else batch


def test_a_bound_of_a_dimension_is_told(tmp_path):
    found = exported(tmp_path, task(twice_above(100)))
    assert found.shapes[0][0] == Dimension(least=1, most=100)
    assert found.conditions == ("batch.shape[0] <= 100",)
    said = as_json(found, plan(), "pt2")
    assert (said["shapes"], said["conditions"]) == ({"batch": [[1, 100], [64, 64]]}, ["batch.shape[0] <= 100"])
    (words,) = (row for row in rendered(explain(found, plan(), tmp_path / "file", "pt2")) if "were run" in row)
    assert words.split("batches")[1].strip() == "8, 4 and 1 were run; the first dimension is 1 to 100"


def test_sizes_that_were_run_are_told_and_no_more_is_claimed(tmp_path):
    data = [torch.ones(64 + 64 * (number >= 8)) for number in range(16)]
    found = exported(tmp_path, task(lambda model, batch: batch.mean(1), dataset=data))
    said = " ".join(" ".join(rendered(explain(found, plan(), tmp_path / "file", "pt2"))).split())
    assert "8, 4 and 1 were run; the first dimension is open" in said
    assert "batch: [open, open (run: 64, 128)]" in said
    assert ".module()(batch), without gradients" in said


def rendered(words: Any) -> list[str]:
    with (console := Console(width=200)).capture() as shown:
        console.print(words)
    return shown.get().splitlines()


def test_a_length_that_is_refused_is_told_by_its_shape(tmp_path):
    """Of batches of one size, two are taken and one is not."""
    data = [torch.ones(64 + 64 * (number >= 8)) for number in range(16)]
    job = task(lambda model, batch: batch.mean(1) * len([0] * int(batch.shape[1])), dataset=data)
    found = exported(tmp_path, job)
    assert found.sizes == (8, 4, 1)
    assert {run.shapes for run in found.refused} == {((8, 128),)}


def test_samples_from_all_over_the_dataset_are_run(tmp_path):
    """Longer ones come after the first two batches of 4."""
    data = [torch.ones(64 + 64 * (number >= 8)) for number in range(20)]
    job = task(lambda model, batch: batch.mean(1))
    collate = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    fields = {**vars_of(job), "build_dataset": lambda: data, "collate": collate}
    found = exported(tmp_path, autotune.Task(**fields), plan(batch=4))
    assert [run.shapes for run in found.runs if run.shapes[0][1] == 128]


def test_a_batch_that_infer_changes_in_place_is_as_it_was(tmp_path):
    found = exported(tmp_path, task(lambda model, batch: model(batch.sub_(0.5))))
    assert max(run.from_plan for run in found.runs) < 1e-6


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1.0)
        return x + self.seen * 1e-6


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (task(model=Counts), "infer changes the model: seen is another after it"),
        (task(lambda model, batch: model(batch) + torch.rand(())), "infer is random: for one batch, run twice, its"),
        (task(dataset=Empty()), "build_dataset returned an empty dataset"),
    ],
    ids=["state", "random", "empty"],
)
def test_what_cannot_be_compared_is_told_in_words(tmp_path, job, said):
    with pytest.raises(TaskError, match=said):
        exported(tmp_path, job)


@pytest.mark.parametrize(
    ("settings", "tolerance", "most"),
    [((), 0.05, 0.01), ((), 0.001, 0.001), ((), None, 0.01), ((Quantization(kind="int8"),), 0.05, 0.05)],
)
def test_in_int8_alone_a_file_may_be_as_far_from_the_plan_as_the_plan_is_from_the_job(settings, tolerance, most):
    judged = {"max_drop": 0.1} if tolerance is None else {"tolerance": tolerance}
    of = plan(*settings).model_copy(update={"inference": Inference(**judged)})
    assert most_from_plan(of) == most


def test_the_doctor_goes_by_what_can_be_imported(monkeypatch):
    """onnxruntime-gpu is imported as onnxruntime, and is no package of that name."""
    installed = {"onnx", "onnxscript"}
    monkeypatch.setattr("autotune.measure.exports.types.find_spec", lambda name: name if name in installed else None)
    assert any("`autotune export --to onnx` lacks onnxruntime: " in advice for advice in _advice(has_cuda=True))
    installed.add("onnxruntime")
    assert not any("autotune export" in advice for advice in _advice(has_cuda=True))


def test_a_file_is_held_to_a_hundredth_of_the_plan(tmp_path):
    """The trace is 2 % off, of 5 % that outputs may be."""
    found = exported(tmp_path, task(lambda model, batch: model(batch) * (1.02 if torch.compiler.is_exporting() else 1)))
    assert "at most 1.00% is allowed. The runtime computes otherwise" in (found.runs[0].unlike or "")


@pytest.mark.parametrize("to", ["pt2", "onnx"])
def test_codes_in_place_of_weights_are_in_no_file(tmp_path, to):
    with pytest.raises(PlanError, match=r"keeps model.0.weight as codes|keeps 0.weight as codes"):
        exported(tmp_path, task(), plan(Quantization(kind="int8_weights")), to)
    assert not [*tmp_path.iterdir()]


def test_samples_are_kept_in_the_folder_of_the_trial(tmp_path, monkeypatch):
    (tmp_path / "trial").mkdir()
    kept = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        kept.append(Path(command[-1]).parent)
        check(Path(command[4]), command[5], Path(command[6]))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("autotune.measure.exports.program.subprocess.run", run)
    options = ExportOptions(to="pt2", file=str(tmp_path / "file"), folder=str(tmp_path / "trial"))
    export(task(), plan(), options, 0, lambda doing: None)
    assert kept == [tmp_path / "trial"]


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
    assert found.runs[0].unlike.endswith("is allowed. Search with a larger --tolerance")


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


@pytest.mark.slow
@needs_onnx
@pytest.mark.parametrize(
    ("infer", "shape"),
    [
        (twice_above(100), (101, 64)),
        (lambda model, batch: batch.sum(1) if batch.shape[0] * 3 + batch.shape[1] < 200 else batch.mean(1), (60, 64)),
        (lambda model, batch: batch.sum(1) if batch.shape[1] % 2 else batch.mean(1), (8, 65)),
    ],
    ids=["bound", "of two", "even"],
)
def test_onnxruntime_refuses_sizes_that_the_trace_is_wrong_for(tmp_path, infer, shape):
    import onnxruntime

    data = [torch.ones(64 + 64 * (number >= 8)) for number in range(16)] if shape[0] < 100 else None
    found = exported(tmp_path, task(infer, dataset=data), to="onnx")
    assert (found.sizes, found.refused) == ((8, 4, 1), ())
    session = onnxruntime.InferenceSession((tmp_path / "file").read_bytes())
    with pytest.raises(Exception, match=r"only where .*batch"):
        session.run(None, {"batch": torch.ones(shape).numpy()})


@pytest.mark.slow
@needs_onnx
def test_outputs_may_have_names_of_values_within_the_model(tmp_path):
    found = exported(tmp_path, task(lambda model, batch: {"relu": model[:2](batch), "linear": model(batch)}), to="onnx")
    assert (found.sizes, found.outputs) == ((8, 4, 1), ("relu", "linear"))


@pytest.mark.parametrize("kind", [pytest.param("bf16", marks=slow_onnx)])
def test_what_onnxruntime_does_not_run_is_told_in_words(tmp_path, kind):
    said = r"onnxruntime does not run it: (?s:.*)Of the plan it has: bf16. Use --to pt2"
    with pytest.raises(PlanError, match=said):
        exported(tmp_path, task(), plan(Precision(kind=kind)), "onnx")


def test_a_model_beyond_what_an_onnx_file_holds_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("autotune.measure.exports.onnx_format._MOST_BYTES", 1000)
    with pytest.raises(PlanError, match=r"at most 1,000 bytes of weights, but there are 33,280. Use --to pt2"):
        exported(tmp_path, task(), to="onnx")
