"""``autotune estimate``: through the command line, and what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from answering import Answering
from command_line import Ended, autotune
from screen import printed

from autotune.commands.estimate import estimate_task
from autotune.errors import NothingFits, TaskError
from autotune.estimates import Estimate, Fill, Fit, Interval, untried
from autotune.report.estimate import as_json, explain, line
from autotune.results import Combination, WhatToEstimate
from autotune.techniques import Settings
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.layers import Layers
from autotune.techniques.models.pruning import Pruning
from autotune.techniques.precision import Precision
from autotune.testing.facts import BARE
from autotune.units import MIB
from autotune.workers import Crashed, Estimated, Inspected

LOOKS = """\
from healthy import batch_size, build_dataset, build_model
import healthy
def compute_loss(model, batch):
    loss = healthy.compute_loss(model, batch)
    return loss if loss.item() >= 0 else -loss
"""


@pytest.fixture
def run(here: Callable[..., Ended], folder: Path) -> Callable[..., Ended]:
    return lambda *options, task="healthy.py": here("estimate", task, *options, cwd=folder)


# The command


@pytest.mark.slow
def test_the_table_the_peak_and_what_helps(folder):
    """Everything fits: all of the dataset, whatever the techniques."""
    ended = autotune("estimate", "healthy.py", "--budget", "8GiB", "--device", "cpu", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert "the largest micro-batch within 8 GiB" in ended.stdout
    assert "as it stands" in ended.stdout
    assert "at a micro-batch of 64" in ended.stdout
    assert "What alone would help most" in ended.stdout
    assert "no micro-batch is larger than the dataset, which has 64 samples" in ended.stdout
    assert "task: 49 parameters" in ended.stderr
    assert "\x1b" not in ended.stdout
    assert ended.left_behind == []


@pytest.mark.slow
def test_json_is_one_document(run):
    """For a card that is not here: a context of 512 MiB, cuBLAS's 64, and 2 for all tensors."""
    ended = run("--device-memory", "1GiB", "--space", "exact", "--json")
    document = json.loads(ended.stdout)
    assert (document["device"], document["limit_bytes"]) == ("cuda", 2**30)
    base = document["combinations"][0]
    assert base["settings"] == {}
    found = base["estimate"]
    assert found["how"] == "traced"
    assert found["largest"]["process"]["value"] == (512 + 64 + 2) * MIB
    assert sum(fill["num_bytes"] for fill in found["fills"]) == found["largest"]["tensors"]["value"]


@pytest.mark.medium
def test_a_model_that_reads_values_is_measured_in_small_steps_and_says_so(folder, run):
    (folder / "looks.py").write_text(LOOKS)
    ended = run("--budget", "8GiB", "--device", "cpu", "--space", "exact", task="looks.py")
    assert ended.returncode == 0, ended.stderr
    assert "not traced, but measured in real steps at small batches" in " ".join(ended.stdout.split())


@pytest.mark.medium
@pytest.mark.parametrize(
    ("task", "options", "code", "words"),
    [
        ("no_model.py", ("--budget", "1GiB"), 2, "no_model.py: no such file. `autotune init no_model.py` writes"),
        ("healthy.py", ("--budget", "3MiB", "--device", "cpu", "--space", "exact"), 3, "nothing fits within 3 MiB"),
        ("healthy.py", ("--budget", "8"), 2, "Was 8GiB meant?"),
        ("healthy.py", ("--device", "cuda"), 2, "Give --budget or --device-memory, such as 24GiB, or --card."),
        ("healthy.py", ("--device", "cpu", "--device-memory", "8GiB"), 2, "Leave one of them out."),
        ("healthy.py", ("--budget", "1GiB", "--space", "none"), 2, "neither a file nor a preset"),
        ("hostile_raises.py", ("--budget", "1GiB"), 2, "hostile_raises.py"),
        ("hostile_segfault.py", ("--budget", "1GiB"), 2, "SIGSEGV"),
    ],
)
def test_what_is_wrong_is_said_and_exits_as_every_command_does(task, options, code, words, run):
    ended = run(*options, task=task)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert words in ended.stderr


def test_an_error_is_one_document_too(run):
    document = json.loads(run("--budget", "1GiB", "--space", "none", "--json").stdout)
    assert (document["exit_code"], "neither a file nor a preset" in document["error"]) == (2, True)


# The driver, told what children say


def fit(micro, process, accumulate=1):
    own = Interval(low=process, value=process, high=process)
    return Fit(micro=micro, accumulate=accumulate, tensors=own, process=own)


def estimated(micro, how="traced"):
    """It takes 1 MiB a sample, and 10 beside."""
    largest = fit(micro, (10 + micro) * MIB) if micro else None
    return Estimated(
        estimate=Estimate(
            how=how,
            reason="it asks for a value" if how == "probed" else None,
            base_bytes=10 * MIB,
            largest=largest,
            smallest=None if micro else fit(1, 11 * MIB),
            surely=micro - 1 if micro else None,
            reference=fit(8, 18 * MIB),
            phase="backward",
            module="head",
            fills=(
                Fill(kind="activation", module="blocks.0-3", num_bytes=30 * MIB),
                Fill(kind="parameter", module="", num_bytes=MIB),
            ),
            seconds=1.0,
        )
    )


CARD = BARE.device.model_copy(update={"bf16": True})
BLOCKS = BARE.model_copy(update={"num_blocks": 4, "block_name": "Block", "device": CARD})


class Says(Answering):
    """Answers by the settings that are asked for."""

    def __init__(self, micro, facts=BLOCKS):
        self.micro, self.facts, self.asked = micro, facts, []

    def answer(self, request):
        if request.kind == "inspect":
            return Inspected(facts=self.facts)
        self.asked.append(request)
        answer = self.micro(request.options.settings)
        return estimated(answer) if isinstance(answer, int) else answer


def micro_of(settings):
    """Checkpointing gives most, bf16 some, layers nothing."""
    return 40 * (3 if settings.checkpointing.kind == "blocks" else 1) + 10 * (settings.precision.kind == "bf16")


WHAT = WhatToEstimate("model.py", 100 * MIB)


def test_combinations_begin_with_the_job_as_it_stands_and_single_techniques():
    executor = Says(micro_of)
    found = estimate_task(WHAT, executor, lambda event: None)
    assert found.base.settings == Settings()
    changes = [one.num_changes for one in found.combinations]
    assert changes == sorted(changes)
    assert len(changes) == len({one.settings.canonical() for one in found.combinations})
    assert {request.options.limit_bytes for request in executor.asked} == {100 * MIB}
    assert {request.kind for request in executor.asked} == {"predict"}


def test_tf32_is_planned_for_a_card_that_is_not_here_and_refused_for_a_cpu():
    executor = Says(micro_of, BLOCKS.model_copy(update={"precision": "tf32"}))
    card = WhatToEstimate("model.py", device="cuda", device_memory_bytes=100 * MIB)
    assert estimate_task(card, executor, lambda event: None).base.micro == 40
    with pytest.raises(TaskError, match=r'model\.py: precision is "tf32", which needs a CUDA device'):
        estimate_task(WHAT, executor, lambda event: None)


@pytest.mark.parametrize(("has_bf16", "half"), [(True, "bf16"), (False, "fp16")])
def test_one_precision_of_two_bytes_is_looked_at(has_bf16, half):
    card = CARD.model_copy(update={"type": "cuda", "bf16": has_bf16})
    executor = Says(micro_of, BLOCKS.model_copy(update={"device": card}))
    estimate_task(WHAT, executor, lambda event: None)
    assert {request.options.settings.precision.kind for request in executor.asked} == {"default", half}


def test_what_helps_is_told_by_single_techniques_the_most_first():
    found = estimate_task(WHAT, Says(micro_of), lambda event: None)
    kinds = [(one.settings.checkpointing.kind, one.settings.precision.kind, one.micro) for one in found.helps()]
    assert kinds == [("blocks", "default", 120), ("none", "bf16", 50)]
    assert all(one.settings.layers == Layers() for one in found.helps())


def test_the_blocks_for_the_jobs_own_batch_are_asked_of_the_job_as_it_stands_and_named():
    class Names(Says):
        def answer(self, request):
            if request.kind == "inspect" or not request.options.choose_blocks:
                return super().answer(request)
            self.asked.append(request)
            base = estimated(4).estimate.model_copy(update={"blocks": (0, 2)})
            return Estimated(estimate=base)

    executor = Names(micro_of)
    found = estimate_task(WHAT, executor, lambda event: None)
    assert [one.options.settings for one in executor.asked if one.options.choose_blocks] == [Settings()]
    said = printed(explain(found), 140)
    assert "checkpoint blocks 0 and 2 of 4" in said
    assert "the least for the job's own batch of 8" in said


def test_what_pruning_would_free_is_told_whatever_the_space():
    """The default space has no pruning: it is looked at alone, at its mildest; 18 MiB become 12."""
    smaller = estimated(60).estimate
    smaller = smaller.model_copy(update={"reference": fit(8, 12 * MIB)})

    def says(settings):
        return Estimated(estimate=smaller) if settings.pruning.kind != "none" else micro_of(settings)

    executor = Says(says, BLOCKS.model_copy(update={"dataset_kind": "map"}))
    found = estimate_task(WHAT, executor, lambda event: None)
    lossy = [one.settings for one in found.combinations if one.settings.affect("function")]
    assert Settings(pruning=Pruning(kind="structured", ratio=0.25)) in lossy
    assert all(len(list(settings.chosen())) == 1 for settings in lossy)
    said = printed(explain(found), 140)
    assert "Lossy, only with --max-quality-drop: tensors at the job's own batch of 8" in said
    assert "(-33%)" in said


def test_nothing_fits_says_what_the_nearest_takes():
    with pytest.raises(NothingFits, match=r"not even a micro-batch of 1\. The nearest takes about 11 MiB"):
        estimate_task(WHAT, Says(lambda settings: 0), lambda event: None)


def test_a_combination_that_crashes_is_told_and_the_others_go_on():
    crash = Crashed(message="Segmentation fault (SIGSEGV)")
    found = estimate_task(
        WHAT, Says(lambda settings: crash if settings.layers.kind == "exact" else 5), lambda event: None
    )
    said = [line(one) for one in found.combinations if one.estimate is None]
    assert said
    assert all("Segmentation fault" in words for words in said)
    failures = [row["failure"] for row in as_json(found)["combinations"]]
    assert any(failure and "SIGSEGV" in failure for failure in failures)


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_has_its_figures_however_long_a_failure_is(width):
    """Names are cut and columns left out where there is no room, and a failure is told below."""
    crash = Crashed(message="Segmentation fault (SIGSEGV), " + "and so on, " * 20)
    found = estimate_task(
        WHAT, Says(lambda settings: crash if settings.layers.kind == "exact" else 5), lambda event: None
    )
    lines = printed(explain(found), width).splitlines()
    assert max(map(len, lines)) <= width
    base = next(row for row in lines if row.startswith("as it stands"))
    assert base.split()[3:5] == ["5", "4"]
    assert any("failed" in row and "SIGSEGV" not in row for row in lines)
    assert "Segmentation fault (SIGSEGV), and so on" in " ".join(" ".join(lines).split())


def test_a_line_says_that_a_combination_was_probed_and_why():
    one = Combination(Settings(checkpointing=Checkpointing(kind="blocks")), estimated(4, "probed"))
    assert line(one) == "checkpoint all blocks: 4, by real steps: it asks for a value"
    assert line(Combination(Settings(precision=Precision(kind="bf16")), estimated(0))) == "bf16: none fits"


@pytest.mark.parametrize(
    ("budget", "memory", "limit"), [(8, None, 8), (None, 24, 24), (8, 24, 8), (32, 24, 24), (None, None, None)]
)
def test_the_limit_is_the_smaller_of_the_budget_and_the_card(budget, memory, limit):
    assert WhatToEstimate("model.py", budget, "cuda", memory).limit_bytes == limit


@pytest.mark.parametrize(("version", "is_tried"), [("2.13.0", True), ("2.13.1+cpu", True), ("2.14.0", False)])
def test_a_torch_that_predictions_were_not_tried_with_is_told(version: str, is_tried: bool):
    assert (untried(version) is None) == is_tried
    assert is_tried or f"tried with torch 2.13, and this is {version}" in untried(version)
