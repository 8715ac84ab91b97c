"""``autotune``: parse, call one function per command, and leave with the right exit code."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn

import typer

from ..commands.interrupts import interruptible
from ..errors import AutotuneError
from ..report.printing import GONE, discard, listened_to, print_json, tell
from .app import app

# isort: off
from . import searching, plans, tasks, service, remote  # noqa: F401 - each adds its commands, shown in this order

# isort: on

_UsageError: type[Any] = typer.BadParameter.__bases__[0]
"""click's, wherever the typer that is installed keeps it."""


def main() -> None:
    """The ``autotune`` command."""
    _have_standard_streams()
    try:
        _run()
    finally:
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            try:
                stream.flush()
            except OSError:  # what is left of it must not decide the exit code
                discard(number)


def _run() -> NoReturn:
    try:
        with interruptible():
            code = app(standalone_mode=False)
        with listened_to(sys.stdout):
            pass
        sys.exit(code)  # a command's own typer.Exit comes back as its code
    except _UsageError as error:
        with suppress(OSError):
            error.show()
        if "--json" in sys.argv:
            print_json({"exit_code": 2, "error": error.format_message()})
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        tell("Interrupted.")
        sys.exit(130)
    except AutotuneError as error:
        tell(str(error))
        sys.exit(error.exit_code)
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        discard(1)  # the reader has had enough, which typer takes for an error
        sys.exit(0)
    except OSError as error:
        _end_for(error)
    except Exception:  # noqa: BLE001 - the outermost frame
        _report_bug()


def _end_for(error: OSError) -> NoReturn:
    """What the system refused: a stream that has gone is no error, and some paths no system has."""
    if error.errno == errno.ENAMETOOLONG:
        tell(f"{str(error.filename)[:80]}…: {error.strerror}. Choose a shorter path.")
        sys.exit(2)
    if error.errno not in (*GONE, errno.ENOSPC):
        _report_bug()
    discard(1)
    if error.errno in GONE:
        sys.exit(0)
    tell(f"What was to be printed could not be written: {error.strerror}.")
    sys.exit(2)


def _report_bug() -> NoReturn:
    tell(f"{traceback.format_exc()}This is a bug in autotune, not in your input. Please report it with the text above.")
    sys.exit(1)


def _have_standard_streams() -> None:
    """A daemon's may be closed, and files opened later would take their numbers; any text can be printed to them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the process's life
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
