"""``export`` through the command line: a file, bad input, and that nothing is left where it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autotune.measure.exports.types import ONNX_PACKAGES

TASK = """
import torch
from torch import nn
batch_size = 8
def build_model():
    return nn.Sequential(nn.Linear(64, 64))
def build_dataset():
    return torch.utils.data.TensorDataset(torch.randn(20, 64, generator=torch.Generator().manual_seed(0)))
def infer(model, batch):
    return {"logits": model(batch[0])}
"""
PLAN = """schema: autotune/plan@1
inference: {tolerance: 0.05}
budget: {device: cpu}
settings:
  batch: {micro: 8}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with a task and a plan."""
    (tmp_path / "model.py").write_text(TASK)
    (tmp_path / "plan.yaml").write_text(PLAN)
    return tmp_path


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"model.py", "plan.yaml", ".autotune", "__pycache__"}


@pytest.mark.slow
def test_a_file_is_written_read_back_elsewhere_and_compared(here, job):
    (job / "plan.yaml").write_text(PLAN + "  quantization: {kind: int8}\n")
    ended = here("export", "plan.yaml", "model.py", "--to", "pt2", "--json", cwd=job)
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert (said["batch_sizes"], said["kept"]) == ([8, 4, 1], ["quantization"])
    assert said["from_plan"] < 1e-6 < said["from_reference"] < 0.05
    assert set(said["left_out"]) == {"batch"}
    module = torch.export.load(job / "plan.pt2").module()
    assert module([torch.ones(3, 64)])["logits"].shape == (3, 64)
    assert left(job) == {"plan.pt2"}
    assert "replaced" not in ended.stderr
    again = here("export", "plan.yaml", "model.py", "--to", "pt2", cwd=job)
    assert (again.returncode, "plan.pt2: replaced" in again.stderr) == (0, True)


@pytest.mark.slow
def test_outputs_beyond_the_tolerance_end_with_3_and_leave_what_was_there(here, job):
    text = PLAN.replace("0.05", "0.000001") + "  quantization: {kind: int8}\n"
    (job / "plan.yaml").write_text(text)
    (job / "plan.pt2").write_text("of an earlier plan")
    ended = here("export", "plan.yaml", "model.py", "--to", "pt2", cwd=job)
    assert ended.returncode == 3
    assert "beside the reference's: its outputs['logits'] differ by" in " ".join(ended.stderr.split())
    assert (job / "plan.pt2").read_text() == "of an earlier plan"
    assert left(job) == {"plan.pt2"}


@pytest.mark.slow
def test_a_value_that_decides_ends_with_2_and_leaves_nothing(here, job):
    (job / "model.py").write_text(
        TASK.replace("    return {", "    if batch[0].sum() > 99:\n        return batch[0]\n    return {")
    )
    ended = here("export", "plan.yaml", "model.py", "--to", "pt2", cwd=job)
    assert ended.returncode == 2
    assert "torch.export cannot trace infer" in ended.stderr
    assert left(job) == set()


def test_bad_input_ends_with_2_before_anything_runs(here, job, monkeypatch):
    training = PLAN.replace("inference: {tolerance: 0.05}\n", "")
    for text, arguments, said in (
        (training, ("model.py", "--to", "pt2"), "the plan is for training, and a file holds what infers"),
        (PLAN, ("--to", "pt2"), "it names no task. Give it: `autotune export plan.yaml model.py`"),
        (PLAN, ("other.py", "--to", "pt2"), "other.py: no such file"),
        (PLAN, ("model.py", "--to", "pt2", "--out", "model.py"), "that is the task itself"),
    ):
        (job / "plan.yaml").write_text(text)
        ended = here("export", "plan.yaml", *arguments, cwd=job)
        assert ended.returncode == 2, ended.stderr
        assert said in " ".join(ended.stderr.split())
    monkeypatch.setattr("autotune.measure.exports.types.find_spec", lambda name: None)
    ended = here("export", "plan.yaml", "model.py", "--to", "onnx", cwd=job)
    assert ended.returncode == 2
    assert f"{', '.join(ONNX_PACKAGES)}: not installed, which --to onnx needs. Install it: pip install" in ended.stderr
    assert left(job) == set()
