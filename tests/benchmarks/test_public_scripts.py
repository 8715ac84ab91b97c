"""``benchmarks.public_scripts`` sees from outside whether two long trainings are the same."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.public_scripts.compare import compared, summary
from benchmarks.public_scripts.run import Failure, Place, without_folders
from benchmarks.public_scripts.scripts import Script
from benchmarks.rows import HERE
from benchmarks.same_training.run import RECORDER, ended

SCRIPT = HERE / "same_training" / "scripts" / "accumulation.py"
NUM_STEPS = 12


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """What is recorded of a script with these words in place of its own, for so many steps."""

    def record(*changes, flags=(), num_steps=NUM_STEPS):
        folder = tmp_path_factory.mktemp("records")
        text = SCRIPT.read_text(encoding="utf-8")
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (folder / "train.py").write_text(text, encoding="utf-8")
        recorded = {"SAME_TRAINING_RECORD": str(folder), "SAME_TRAINING_STEPS": str(num_steps)}
        job = ended(
            [sys.executable, "train.py", *flags], folder, {**os.environ, "PYTHONPATH": str(RECORDER), **recorded}, 60
        )
        (path,) = folder.glob("*.json")
        return job.returncode, json.loads(path.read_text(encoding="utf-8"))

    return record


@pytest.fixture(scope="module")
def own(record):
    """Of the script as it stands: 24 steps, if it is left alone."""
    return record()


@pytest.mark.medium
def test_a_script_ends_after_its_last_step(own):
    returncode, found = own
    assert (returncode, len(found["steps"])) == (0, NUM_STEPS)


@pytest.mark.medium
def test_a_script_that_ends_before_has_fewer_steps(record):
    assert len(record(num_steps=100)[1]["steps"]) == 24


@pytest.mark.medium
def test_the_same_training_is_the_same(own, record):
    found = compared(own[1], record()[1], None)
    assert found == {"samples": "same 96", "faults": [], "first_losses": 0.0, "all_losses": 0.0}


@pytest.mark.medium
def test_a_batch_in_two_halves_has_the_same_samples(own, record):
    halves = record(flags=("--batch-size", "4", "--grad-accum", "2"))[1]
    found = compared(own[1], halves, 2)
    assert (found["samples"], found["faults"]) == ("same 96", [])
    assert found["first_losses"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("lr=0.02", "lr=0.04", "learning rates: at step 1 [0.04] in place of [0.02]"),
        ("shuffle=True", "shuffle=False", "samples: DIFFERENT: in epoch 0, of loader 0, within the first 8"),
        ("torch.optim.SGD", "torch.optim.RMSprop", "optimizer: at step 1 RMSprop 0 in place of SGD 0"),
        (
            "loss.backward()",
            "(loss / 2).backward(retain_graph=True); (loss / 2).backward()",
            "backward passes: at step 1",
        ),
    ],
)
def test_another_training_is_told(old, new, fault, own, record):
    other = record((old, new))[1]
    assert any(told.startswith(fault) for told in compared(own[1], other, None)["faults"])


def test_the_peak_is_the_process_own(own):
    assert 50 * 2**20 < summary(own[1])["peak_bytes"] < 4 * 2**30


def test_a_row_names_no_folder_of_the_machine(tmp_path):
    """A script that fails says where it lies, and which Python ran it."""
    place = Place(Script("owner/name", "0000000", "train.py --to /out/of/it"), tmp_path, tmp_path)
    (tmp_path / "name").mkdir()
    (tmp_path / "name" / "train.py").write_text("raise SystemExit(f'cannot read {__file__}')", encoding="utf-8")
    with pytest.raises(Failure) as failed:
        place.train(2, is_planned=False)
    assert sys.executable in str(failed.value)
    assert without_folders({"faults": [str(failed.value)], "seen": "1/2 of https://a.b/c/d (../../e/plan.yaml)"}) == {
        "faults": [f"{Path(sys.executable).name} train.py --to it: 0 of 2 steps: cannot read train.py"],
        "seen": "1/2 of https://a.b/c/d (plan.yaml)",
    }
