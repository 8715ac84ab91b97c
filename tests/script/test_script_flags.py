"""A command without placeholders: the flags that are known to take a batch, and when they are used."""

from __future__ import annotations

import sys

import pytest
from screen import printed
from search_tables import facts, options, run_search

from autotune.commands.preview import preview_search
from autotune.errors import UserError
from autotune.report.preview import explain
from autotune.script.command import filled, own_batch, own_evaluation
from autotune.script.flags import fill, flags_of, with_evaluation, with_placeholders
from autotune.searches.events import Warned
from autotune.searches.own_flags import batch_stays
from autotune.techniques.batch import Batch
from autotune.workers.table import TableExecutor

pytestmark = pytest.mark.usefixtures("elsewhere")


START = [sys.executable, "train.py"]
KNOWN = {
    "--batch-size 32 --grad-accum 2": "--batch-size {batch.micro=32} --grad-accum {batch.accumulate=2}",
    "--batch_size=12 --gradient_accumulation_steps=5": (
        "--batch_size={batch.micro=12} --gradient_accumulation_steps={batch.accumulate=5}"
    ),
    "-b 128 --lr 1 --grad-accum-steps 1": "-b {batch.micro=128} --lr 1 --grad-accum-steps {batch.accumulate=1}",
    "--data.batch_size 8 --trainer.accumulate_grad_batches=4": (
        "--data.batch_size {batch.micro=8} --trainer.accumulate_grad_batches={batch.accumulate=4}"
    ),
    "--per_device_train_batch_size 8 --bf16": (
        "--per_device_train_batch_size {batch.micro=8} --bf16 --gradient_accumulation_steps {batch.accumulate=1}"
    ),
    "data.batchSize=4 --gradient_accumulate_every=8": (
        "data.batchSize={batch.micro=4} --gradient_accumulate_every={batch.accumulate=8}"
    ),
    "data.batch_size=4 +trainer.accumulate_grad_batches=8": (
        "data.batch_size={batch.micro=4} +trainer.accumulate_grad_batches={batch.accumulate=8}"
    ),
    "--batch_size_per_gpu 16 --grad_accumulation_steps=2": (
        "--batch_size_per_gpu {batch.micro=16} --grad_accumulation_steps={batch.accumulate=2}"
    ),
    "train.local_batch_size=16 optim.accum_grad=2": (
        "train.local_batch_size={batch.micro=16} optim.accum_grad={batch.accumulate=2}"
    ),
    "--device-batch-size=8 --total-batch-size=4096": "--device-batch-size={batch.micro=8} --total-batch-size=4096",
}
UNKNOWN = [
    "--batch-size 32",
    "--batch-size 32 --micro-batch-size 8 --grad-accum 4",
    "--batch-size auto --grad-accum 2",
    "--eval-batch-size 32 --grad-accum 2",
    "--batch-size {batch.micro=32} --grad-accum 2",
]


@pytest.mark.parametrize("words", KNOWN)
def test_known_flags_become_placeholders(words):
    assert with_placeholders([*START, *words.split()]) == [*START, *KNOWN[words].split()]


@pytest.mark.parametrize("words", UNKNOWN)
def test_a_command_that_does_not_say_both_for_sure_stays(words):
    assert with_placeholders([*START, *words.split()]) is None


def test_flags_before_the_script_are_not_its_own():
    command = ["numactl", "-b", "1", *START, "--bs=2", "--accumulate=3"]
    assert with_placeholders(command) == [*command[:5], "--bs={batch.micro=2}", "--accumulate={batch.accumulate=3}"]
    assert with_placeholders(["./train.sh", "-b", "1", "--accumulate=1"]) is None


def test_a_plans_batch_goes_into_flags_that_state_another():
    command = [*START, "--bs=8", "--grad-accum", "1"]
    changed, said = fill(command, Batch(micro=2, accumulate=4))
    assert changed == [*START, "--bs=2", "--grad-accum", "4"]
    assert said == "the plan's batch is in the script's own flags: --bs=2 --grad-accum 4."
    assert fill(command, Batch(micro=8)) == (command, None)
    assert fill(command, None) == (command, None)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--per_device_eval_batch_size 8 --bf16", "--per_device_eval_batch_size {evaluation.batch=8} --bf16"),
        ("-b 32 -vb 64", "-b 32 -vb {evaluation.batch=64}"),
        ("--data.eval_batch_size=4", "--data.eval_batch_size={evaluation.batch=4}"),
        ("--batch-size 32 --grad-accum 1", None),
        ("--eval-batch-size 4 --test-batch-size 8", None),
        ("--eval-batch-size {evaluation.batch=4} --test-batch-size 8", None),
    ],
)
def test_the_flag_of_the_evaluation_batch(words, expected):
    assert with_evaluation([*START, *words.split()]) == (expected and [*START, *expected.split()])


def test_a_placeholder_for_evaluation_is_none_for_training():
    command = [*START, "--bs=8", "--grad-accum=1", "--eval={evaluation.batch=4}"]
    assert own_batch(command) is None
    assert own_evaluation(command) == 4
    assert with_placeholders(command)[-1] == command[-1]
    assert filled(command, None)[-1] == "--eval=4"
    assert filled(command, None, 64)[-1] == "--eval=64"
    with pytest.raises(UserError, match=r"Write it into the braces: \{evaluation\.batch=64\}"):
        filled([*START, "--eval={evaluation.batch}"], None)


def test_a_plans_evaluation_batch_goes_into_its_flag():
    command = [*START, "--bs=8", "--grad-accum=1", "--eval-batch-size", "4"]
    changed, said = fill(command, Batch(micro=8), 64)
    assert changed == [*command[:-1], "64"]
    assert said == "the plan's batch is in the script's own flags: --eval-batch-size 64."
    assert fill(command, Batch(micro=8), 4) == fill(command, Batch(micro=8)) == (command, None)
    both, said = fill(command, Batch(micro=2, accumulate=4), 64)
    assert both[2:] == ["--bs=2", "--grad-accum=4", "--eval-batch-size", "64"]
    assert said.endswith("--bs=2 --grad-accum=4 --eval-batch-size 64.")


def test_a_script_that_accumulates_up_to_a_total_is_told_its_micro_batch_alone():
    command = [*START, "--batch_size", "8", "--total_batch_size=64"]
    own = Batch(micro=8, accumulate=4)  # tokens, or samples: what it was seen to do counts
    assert flags_of(with_placeholders(command, own)) == "--batch_size {batch.micro=8}"
    assert with_placeholders(command, Batch(micro=4, accumulate=8)) is None
    changed, said = fill(command, Batch(micro=2, accumulate=16))
    assert (changed[2:4], said) == (
        ["--batch_size", "2"],
        "the plan's batch is in the script's own flags: --batch_size 2.",
    )
    assert fill(command, own) == (command, None)


@pytest.fixture
def search(in_memory):
    def search(words, **changes):
        return run_search(options(task="train.py", command=(*START, *words.split()), trials=8, **changes))

    return search


def said_of_batches(run):
    return [event.message for event in run.events if isinstance(event, Warned) and "batch" in event.message]


def test_a_search_takes_the_flags_that_state_what_the_script_was_seen_to_train_with(search):
    """The table's job trains on 64 × 1."""
    run = search("--batch-size 64 --grad-accum 1")
    assert len({settings.batch.micro for settings in run.measured}) > 1
    (said,) = said_of_batches(run)
    flags = "--batch-size {batch.micro=64} --grad-accum {batch.accumulate=1}"
    assert said == f"the batch is searched through flags of the script: {flags}. --flags off leaves them alone."
    assert flags.replace("{", "'{").replace("}", "}'") in run.plan.notes[0]


@pytest.mark.parametrize(
    ("words", "changes"), [("--batch-size 32 --grad-accum 1", {}), ("--batch-size 64 --grad-accum 1", {"flags": "off"})]
)
def test_other_flags_and_flags_off_leave_the_batch_and_say_so_once(words, changes, search):
    run = search(words, **changes)
    assert {settings.batch for settings in run.measured} == {Batch(micro=64)}
    (said,) = said_of_batches(run)
    assert said.startswith("batch stays as it is: " + ("--flags off" if changes else words))


FOR_BOTH = "Where the script has flags for both, say which they are, with today's numbers: "
PASSES = "accumulation (backward passes in an optimizer step)"
MISSING = {
    "-b 32": (
        f"-b 32 is taken for the micro-batch, but no flag for {PASSES} is known. {FOR_BOTH}"
        "-b {batch.micro=32} --NAME {batch.accumulate=1}"
    ),
    "--grad-accum=2 --lr 1": (
        f"--grad-accum=2 is taken for {PASSES}, but no flag for the micro-batch is known. {FOR_BOTH}"
        "--NAME {batch.micro=N} --grad-accum={batch.accumulate=2}"
    ),
    "--lr 1": (
        f"no flag for the micro-batch or {PASSES} is known. {FOR_BOTH}"
        "--NAME {batch.micro=N} --NAME {batch.accumulate=1}"
    ),
    "--total-batch-size 64": (
        "no flag for the micro-batch is known. Say which it is, with today's number: --NAME {batch.micro=N}"
    ),
    "--batch-size 32 --micro-batch-size 8 --grad-accum 4": (
        f"--batch-size 32 and --micro-batch-size 8 may each be the micro-batch. {FOR_BOTH}"
        "--batch-size {batch.micro=32} --grad-accum {batch.accumulate=4}"
    ),
    "--batch-size auto --grad-accum 2": (
        f"--batch-size auto states no whole number for the micro-batch. {FOR_BOTH}"
        "--batch-size {batch.micro=N} --grad-accum {batch.accumulate=2}"
    ),
    "--bs 8 --passes {batch.accumulate=2}": (
        "the command has {batch.accumulate} alone. Write {batch.micro=N} too, into the flag for the micro-batch, with "
        "today's number for N"
    ),
}


@pytest.mark.parametrize("words", MISSING)
def test_a_command_is_told_which_flag_it_misses_before_it_runs(words):
    assert batch_stays(options(command=(*START, *words.split()))) == MISSING[words]


@pytest.mark.parametrize(
    "words",
    [
        "--batch-size 64 --grad-accum 1",
        "--bs {batch.micro=8} --acc {batch.accumulate=2}",
        "--bs 8 --total-batch-size 9",
    ],
)
def test_a_command_with_both_flags_is_told_nothing_before_it_runs(words):
    assert batch_stays(options(command=(*START, *words.split()))) is None


def test_flags_that_state_another_batch_than_the_one_seen_are_named_with_it():
    said = batch_stays(options(command=(*START, "--bs=8", "--accum", "2")), Batch(micro=4, accumulate=4))
    assert said.startswith("--bs=8 --accum 2: the script was seen to train with another, 4 × 4 (micro-batch × ")
    assert said.endswith("--NAME {batch.micro=4} --NAME {batch.accumulate=4}")


def test_a_placeholder_alone_is_enough_where_the_script_was_seen_to_accumulate():
    asked = options(command=(*START, "--bs", "{batch.micro=8}"))
    assert batch_stays(asked, Batch(micro=8, accumulate=4)) is None
    assert "the command has {batch.micro} alone" in batch_stays(asked, Batch(micro=8))


@pytest.mark.parametrize(
    ("words", "flag"),
    [("-b 32", "-b 32 is taken for the micro-batch"), ("--bs 64 --acc-steps 1", "--bs {batch.micro=64}")],
)
def test_a_dry_run_says_once_which_flags_it_takes_or_misses(words, flag):
    told, asked = [], options(task="train.py", command=(*START, *words.split()))
    found = preview_search(asked, TableExecutor(facts(), []), observe=told.append)
    said = printed(explain(found, asked), 400)
    assert "".join([*(event.message for event in told), said]).count(flag) == 1


def test_the_words_that_tell_the_batch():
    command = [*START, "--bs={batch.micro=8}", "--lr", "1", "--acc", "{batch.accumulate=2}"]
    assert flags_of(command) == "--bs={batch.micro=8} --acc {batch.accumulate=2}"
