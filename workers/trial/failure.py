"""From what was raised in a trial to an outcome."""

from __future__ import annotations

import errno
import traceback

import torch

from ...errors import UserError
from ...measure.errors import NonFiniteLoss
from ...measure.memory import Charge
from ...training.out_of_memory import chain, is_out_of_memory
from ..outcome import Failed, Lost, NonFinite, Outcome, OutOfMemory
from .traces import plain, text_of, traceback_of

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def outcome_of(error: BaseException, device: str) -> Outcome:
    """What an exception that ended a trial means."""
    if isinstance(error, NonFiniteLoss):
        return NonFinite(step=error.step, message=str(error))
    if is_out_of_memory(error):
        return OutOfMemory(peak_bytes=Charge(torch.device(device)).peak().process, message=_last_line(error))
    if is_out_of_room(error):
        where = "Free some space on the disk that the task writes to."
        return Lost(message=f"{_last_line(error)}. {where}\n{traceback_of(error)}".rstrip())
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int | None) else plain(text_of(error))
        return Failed(message=f"the task called sys.exit({code!r})", traceback=traceback_of(error))
    if isinstance(error, UserError):
        return Failed(message=str(error), traceback=traceback_of(error.__cause__) if error.__cause__ else "")
    return Failed(message=_last_line(error), traceback=traceback_of(error))


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
