"""What can go wrong, named by what the caller should do about it."""

from __future__ import annotations

from collections.abc import Sequence


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


class OutOfTime(AutotuneError):
    """``--max-time`` ended a search before it had tried anything; what was measured is kept."""

    exit_code = 3


class Interrupted(AutotuneError):
    """The user stopped a search before it had anything to write; what was measured is kept."""

    exit_code = 130
