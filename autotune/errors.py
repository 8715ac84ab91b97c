"""What can go wrong, named by what the caller should do about it."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self


class AutotuneError(Exception):
    """Anything this package raises on purpose. ``exit_code`` is what the CLI leaves with."""

    exit_code = 1


class UserError(AutotuneError):
    """The user's input is at fault; the message says what was wanted, what was got, where, and what to do."""

    exit_code = 2


class TaskError(UserError):
    """A task file is missing something, does not import, or its code raised."""


class PlanError(UserError):
    """A plan is malformed, belongs to another model, or asks for what this model or device cannot do."""


class SpaceError(UserError):
    """A search space names an unknown technique or value."""


class StudyError(UserError):
    """A study is locked, corrupt, or belongs to another task."""


class UnlikeDevices(UserError):
    """Where devices of one type were asked for, there are several. ``types`` has the name and memory of each."""

    def __init__(self, message: str, types: Sequence[str]) -> None:
        super().__init__(message)
        self.types = tuple(types)


class TrialsLost(UserError):
    """What runs trials has failed, such as a disk, a server or a cluster: it says nothing of any configuration. The
    message says what to do; what was measured before is kept."""


class NothingFits(AutotuneError):
    """No configuration stayed within the budget: a result, with the nearest miss in the message."""

    exit_code = 3


class OutputsDiffer(AutotuneError):
    """What was written computes something else than the plan that it was written of. It was removed."""

    exit_code = 3


class OutOfTime(AutotuneError):
    """``--max-time`` ended a search before it had tried anything; what was measured is kept."""

    exit_code = 3


class Interrupted(AutotuneError):
    """The user stopped a search before it had anything to write; what was measured is kept."""

    exit_code = 130


def first_line(error: BaseException) -> str:
    """Of what began it, with its kind: ``ValueError: no such axis``."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


class Caught:
    """A context that keeps what is raised within it: for a user's code, which may raise anything, and for the outermost
    frame of a thread. ``tests/test_structure.py`` lists each use, with what is done about it."""

    def __init__(self, *but: type[BaseException], of: type[BaseException] = Exception, frames: bool = False) -> None:
        """
        Args:
            but: goes up.
            of: what is kept.
            frames: with its traceback. What is in those frames, such as a model, stays in memory as long as it: see to
                it that :meth:`take` ends that.
        """
        self._but, self._of, self._frames = but, of, frames
        self.error: BaseException | None = None
        """What was raised; None where nothing was."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if not isinstance(error, self._of) or isinstance(error, self._but):
            return False
        self.error = error if self._frames else error.with_traceback(None)
        return True

    def take(self) -> BaseException:
        """What was raised, which is not kept any longer."""
        error, self.error = self.error, None
        assert error is not None, "nothing was raised"
        return error
