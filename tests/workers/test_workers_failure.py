"""What was raised in a trial, and what it means."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

import autotune
from autotune.errors import PlanError, TaskError
from autotune.measure.errors import NonFiniteLoss
from autotune.workers import Failed, NonFinite, OutOfMemory
from autotune.workers.outcome import OUTCOME
from autotune.workers.trial.failure import outcome_of
from autotune.workers.trial.traces import without_our_frames

OURS = Path(autotune.__file__).parent


def raised(error, cause=None):
    with pytest.raises(type(error)) as caught:
        raise error from cause
    return outcome_of(caught.value, "cpu")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("NCCL error ... Cuda failure 2 'out of memory'"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8589934592 bytes."),
        RuntimeError("unable to mmap 268435456 bytes from file </torch_1>: Cannot allocate memory (12)"),
    ],
)
def test_running_out_of_memory_is_known_by_type_and_by_text(error):
    outcome = raised(error)
    assert isinstance(outcome, OutOfMemory)
    assert outcome.peak_bytes > 0


def test_running_out_of_memory_is_known_where_another_error_was_raised_from_it():
    assert isinstance(raised(ValueError("no batch"), MemoryError()), OutOfMemory)


def test_a_text_about_memory_in_another_error_is_not_running_out_of_it():
    assert isinstance(raised(ValueError("CUDA out of memory is what this parser looks for")), Failed)


def test_a_user_error_is_its_message():
    assert raised(TaskError("model.py: missing build_model.")) == Failed(message="model.py: missing build_model.")


def test_a_user_error_keeps_the_traceback_of_what_caused_it():
    outcome = raised(PlanError("it cannot be applied."), ZeroDivisionError("division by zero"))
    assert outcome.message == "it cannot be applied."
    assert outcome.traceback.endswith("ZeroDivisionError: division by zero\n")


def test_a_loss_that_is_not_finite_keeps_its_step():
    outcome = raised(NonFiniteLoss(3, float("nan")))
    assert isinstance(outcome, NonFinite)
    assert outcome.step == 3


def test_our_frames_and_their_source_lines_are_left_out_of_a_chain_of_tracebacks():
    text = f"""Traceback (most recent call last):
  File "{OURS}/workers/trial/child.py", line 59, in _answer
    return _run(request)
           ^^^^^^^^^^^^^
  File "/home/user/model.py", line 3, in build_model
    return 1 / 0
           ~~^~~
ZeroDivisionError: division by zero

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "{OURS.resolve()}/task.py", line 1, in load_task
    raise
  File "/home/user/model.py", line 5, in build_model
    raise ValueError
ValueError
"""
    assert (
        without_our_frames(text)
        == """Traceback (most recent call last):
  File "/home/user/model.py", line 3, in build_model
    return 1 / 0
           ~~^~~
ZeroDivisionError: division by zero

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/user/model.py", line 5, in build_model
    raise ValueError
ValueError
"""
    )


def test_causes_that_go_round_in_a_circle_end():
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert outcome_of(one, "cpu").message == "ValueError: one"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Mute(), "Mute: (its text cannot be had: RuntimeError)"),
        (ValueError("bad \udc80"), "ValueError: bad \\udc80"),
        (ValueError("\x1b[31mred"), "ValueError: \\x1b[31mred"),
        (SystemExit(Mute()), "the task called sys.exit('(its text cannot be had: RuntimeError)')"),
    ],
)
def test_whatever_an_exception_says_an_outcome_can_carry_it(error: BaseException, message: str):
    outcome = outcome_of(error, "cpu")
    assert outcome.message == message
    assert OUTCOME.validate_json(outcome.model_dump_json()) == outcome


def test_of_a_very_long_message_the_ends_are_kept():
    outcome = outcome_of(ValueError("x" * 10**6), "cpu")
    assert len(outcome.message) + len(outcome.traceback) < 100_000


def test_a_fault_of_ours_keeps_our_frames():
    namespace = {}
    exec(compile("def fail():\n    raise KeyError('ours')", str(OURS / "apply_plan.py"), "exec"), namespace)
    try:
        namespace["fail"]()
    except KeyError as error:
        error.__traceback__ = error.__traceback__.tb_next  # less this test, which is a user's file
        outcome = outcome_of(error, "cpu")
    assert "apply_plan.py" in outcome.traceback
