"""Running a script as Python itself would, in this process: ``__main__``, ``sys.argv``, ``sys.path``, its ending. A
plan or a trial comes in right after torch is imported: a script may set environment variables before that."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn

from ..errors import AutotuneError, Caught
from ..training.launched import PLAN_VARIABLE, TRIAL_VARIABLE
from .arrivals import when_imported
from .scratch import found_from


def launch(words: Sequence[str]) -> NoReturn:
    """Run ``[--add-path] train.py its arguments`` or ``[--add-path] -m package its arguments``, with the plan that
    :data:`PLAN_VARIABLE` names applied, or as the trial of :data:`TRIAL_VARIABLE`; without one it is as if Python had
    run it. Ends this process."""
    adds_path = words[:1] == ["--add-path"]
    words, origin = words[adds_path:], os.getcwd()
    ended = _arm()
    with Caught(of=BaseException, frames=True) as raised:
        if words[:1] == ["-m"]:
            _run_module(words[1:], [os.getcwd(), origin] if adds_path else [])
        else:
            _run_file([found_from(words[0], origin), *words[1:]], adds_path)
    ended(error := raised.error)
    if isinstance(error, SystemExit | KeyboardInterrupt):
        raise error
    if error is not None:
        _end_as_python(error)
    sys.exit()


def _arm() -> Callable[[BaseException | None], None]:
    """Have a plan applied, or the script measured, once torch is there; returns what is to be told of its end."""
    trial, plan = os.environ.pop(TRIAL_VARIABLE, None), os.environ.get(PLAN_VARIABLE)
    if trial is not None:
        from .trial.trial import ScriptTrial

        one = ScriptTrial(Path(trial))
        when_imported("numpy", one.seed_numpy)
        when_imported("torch", one.arrive)
        return one.ended
    if plan is not None:
        from .plan.job import ScriptJob
        from .refusal import refuse

        try:
            job = ScriptJob(Path(plan))
        except AutotuneError as error:
            refuse(str(error))
        when_imported("torch", job.arrive)
        return job.ended
    return lambda error: None


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
        __file__=file, __builtins__=builtins, __cached__=None, __loader__=SourceFileLoader("__main__", file)
    )
    sys.modules["__main__"] = module
    exec(compile(Path(path).read_bytes(), file, "exec", dont_inherit=True), vars(module))


def _run_module(words: Sequence[str], places: Sequence[str]) -> None:
    if not words:
        print("Argument expected for the -m option", file=sys.stderr)
        sys.exit(2)
    sys.path[:0] = dict.fromkeys(places)
    sys.argv = [words[0], *words[1:]]
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _end_as_python(error: BaseException) -> NoReturn:
    """The traceback without the launcher's own frames."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.excepthook(type(error), error, trace)
    sys.exit(1)
