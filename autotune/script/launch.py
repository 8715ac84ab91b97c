"""Running a script as Python itself would, in this process: ``__main__``, ``sys.argv``, ``sys.path``, its ending."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn

from ..errors import AutotuneError
from .arrival import when_imported

__all__ = ["PLAN_VARIABLE", "launch", "refuse"]

PLAN_VARIABLE = "AUTOTUNE_PLAN"
"""Names the plan that the script is to run with."""
_ADD_PATH = "--add-path"
"""Python's own place for the script is to be first on ``sys.path``: it was not started with ``-P``."""


def launch(words: Sequence[str]) -> NoReturn:
    """Run ``[--add-path] train.py its arguments`` or ``[--add-path] -m package its arguments``, with the plan that
    :data:`PLAN_VARIABLE` names in force; without one it is as if Python had run it. Ends this process."""
    adds_path = words[:1] == [_ADD_PATH]
    words = words[adds_path:]
    _arm()
    if words[:1] == ["-m"]:
        _run_module(words[1:], adds_path)
    else:
        _run_file(words, adds_path)
    sys.exit()


def refuse(reason: str) -> NoReturn:
    """End the script: it is the user's to change something."""
    print(f"autotune: {reason}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def _arm() -> None:
    plan = os.environ.get(PLAN_VARIABLE)
    if plan is None:
        return
    from .applied import apply_to_script

    try:
        when_imported("torch", apply_to_script(Path(plan)))
    except AutotuneError as error:
        refuse(str(error))


def _run_file(words: Sequence[str], adds_path: bool) -> None:
    path = words[0]
    sys.argv = list(words)
    if not os.path.isfile(path):  # a folder or an archive with a __main__.py, or nothing
        if not os.path.exists(path):
            print(f"{sys.executable}: can't open file {os.path.abspath(path)!r}: No such file", file=sys.stderr)
            sys.exit(2)
        runpy.run_path(path, run_name="__main__")
        return
    if adds_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    file = os.path.abspath(path)
    module = ModuleType("__main__")
    vars(module).update(
        __file__=file,
        __builtins__=builtins,
        __cached__=None,
        __loader__=SourceFileLoader("__main__", file),
    )
    sys.modules["__main__"] = module
    try:
        exec(compile(Path(path).read_bytes(), file, "exec", dont_inherit=True), vars(module))
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - as Python's own last frame does
        _end_as_python(error)


def _run_module(words: Sequence[str], adds_path: bool) -> None:
    if not words:
        refuse("-m: no module was named. Write `python -m package`.")
    if adds_path:
        sys.path.insert(0, os.getcwd())
    sys.argv = [words[0], *words[1:]]
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _end_as_python(error: BaseException) -> NoReturn:
    """The traceback without the launcher's own frames."""
    trace: TracebackType | None = error.__traceback__
    if trace is not None:
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.excepthook(type(error), error, trace)
    sys.exit(1)
