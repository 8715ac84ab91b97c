"""From what was raised in a trial to an outcome."""

from __future__ import annotations

import errno
import traceback

import torch

from ...errors import UserError
from ...measure.errors import DeviceLost, NonFiniteLoss
from ...measure.memory import Charge
from ...measure.others import shortage
from ...training.out_of_memory import chain, ran_out
from ..outcome import Failed, Lost, NonFinite, Outcome, OutOfMemory, host_ran_out
from .traces import plain, text_of, traceback_of

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_OF_CARD = (
    "CUDA-capable device(s) is/are busy or unavailable",
    "CUDA driver version is insufficient for CUDA runtime version",
    "MPS client failed to connect to the MPS control daemon or the MPS server",
    "forward compatibility was attempted on non supported HW",
    "Invalid access of peer GPU memory over nvlink or a hardware error",
    "no CUDA-capable device is detected",
    "system has unsupported display driver / cuda driver combination",
    "system not yet initialized",
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error detected during the execution",
    "CUDA error: unknown error",
    # torch 2.13, torch/cuda/__init__.py and c10/cuda/CUDAFunctions.cpp
    "Found no NVIDIA driver on your system",
    "The NVIDIA driver on your system is too old",
    "No CUDA GPUs are available",
    "Unexpected error from cudaGetDeviceCount()",
    "Torch not compiled with CUDA enabled",
)
"""What a card that fails says, or a driver that torch cannot use, whatever a task does: cudaGetErrorString's texts.
Source: https://docs.nvidia.com/cuda/cuda-runtime-api, cudaError_t"""


def outcome_of(error: BaseException, device: str) -> Outcome:
    """What an exception that ended a trial means."""
    if isinstance(error, NonFiniteLoss):
        return NonFinite(step=error.step, message=str(error))
    if (lost := next((link for link in chain(error) if isinstance(link, DeviceLost)), None)) is not None:
        return Lost(message=str(lost))
    if (whose := ran_out(error)) is not None:
        if device == "cuda" and whose == "host":
            return Failed(message=host_ran_out(_last_line(error)), traceback=traceback_of(error))
        if device == "cuda" and (short := _shortage(error)) is not None:
            return Lost(message=short)
        return OutOfMemory(peak_bytes=_peak_bytes(device), message=_last_line(error))
    if device == "cuda" and _is_of_card(error):
        return Lost(message=plain(text_of(error)).strip())
    if is_out_of_room(error):
        where = "Free some space on the disk that the task writes to."
        return Lost(message=f"{_last_line(error)}. {where}\n{traceback_of(error)}".rstrip())
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int | None) else plain(text_of(error))
        return Failed(message=f"the task called sys.exit({code!r})", traceback=traceback_of(error))
    if isinstance(error, UserError):
        return Failed(message=str(error), traceback=traceback_of(error.__cause__) if error.__cause__ else "")
    return Failed(message=_last_line(error), traceback=traceback_of(error))


def _peak_bytes(device: str) -> int:
    """What was charged: of a device that has failed and does not say, what its allocator had reserved."""
    charge = Charge(torch.device(device))
    try:
        return charge.peak().process
    except RuntimeError:
        return charge.high_water_bytes()


def _shortage(error: BaseException) -> str | None:
    said = next(text_of(link) for link in chain(error) if ran_out(link) is not None)
    try:
        return shortage(plain(said))
    except RuntimeError:  # the device has failed
        return None


def _is_of_card(error: BaseException) -> bool:
    said = (text_of(link) for link in chain(error) if isinstance(link, RuntimeError | AssertionError))
    return any(words in text for text in said for words in _OF_CARD)


def is_out_of_room(error: BaseException) -> bool:
    """Whether a disk was full, which has nothing to do with the configuration.

    What :mod:`multiprocessing` wants is shared memory, of which a configuration may take too much.
    """
    return any(
        isinstance(link, OSError) and link.errno in _NO_ROOM and not _is_for_sharing(link) for link in chain(error)
    )


def _is_for_sharing(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "/multiprocessing/" in frames[-1].filename


def _last_line(error: BaseException) -> str:
    """Class and message; of an error that a loader worker sent, the last line of the worker's own traceback."""
    text = text_of(error)
    lines = plain(f"{type(error).__name__}: {text}").rstrip().splitlines()
    return lines[-1] if "Original Traceback" in text else lines[0]
