"""``load_task("model.py")``: reads a task from a Python file, which need not import this package; and tells, without
running it, what a file defines."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

from .errors import TaskError
from .task import REQUIRED, REQUIRED_OF_INFERENCE, SIGNATURES, Task


def load_task(source: str, inference: bool = False) -> Task:
    """Read a task from a Python file.

    Args:
        source: ``path/to/model.py``, or ``path/to/model.py:name`` for a ``Task`` object of that name. The file defines
            the functions of :data:`SIGNATURES`, or ``task = autotune.Task(...)``. Modules beside it can be imported.
        inference: the job is to run ``infer``; nothing that trains is needed then.

    Returns:
        The task, with ``source`` set.

    Raises:
        TaskError: no such file, or missing pieces, all named at once with the signature that is wanted.
        Exception: whatever the file itself raises when it is run.
    """
    path, name = split_source(source)
    refuse_script(source)
    module = _import(path)
    if name is None and not isinstance(getattr(module, "task", None), Task):
        return _from_functions(module, source, inference)
    task = getattr(module, name or "task", None)
    if not isinstance(task, Task):
        known = sorted(key for key, value in vars(module).items() if isinstance(value, Task))
        raise TaskError(
            f"{path}: expected a Task called {name!r}, but found {'no Task' if not known else ', '.join(known)}. "
            f"Define `{name} = autotune.Task(...)`."
        )
    task = replace(task, source=source)
    if inference:
        return task.for_inference()
    task.check_trains()
    return task


def refuse_script(source: str, command: str = "search") -> None:
    """Look at a file, without running it, for anything that a task file defines.

    A training script given by mistake would train for hours before it could be said that it is none. Where names may
    come about in another way (a star import, ``exec``), or the file cannot be read, only running it tells.

    Args:
        source: ``path/to/model.py[:name]``.
        command: of autotune's, that takes a script too.

    Raises:
        TaskError: no such file, or it defines nothing of a task.
    """
    path, name = split_source(source)
    if path.suffix != ".py":
        return
    try:
        bound = bound_names(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    if bound is None or not bound.isdisjoint({*REQUIRED, "build_loader", name or "task"}):
        return
    raise TaskError(
        f"{source}: defines none of {', '.join(REQUIRED)}, and no `{name or 'task'}`. If it is a training script, "
        f"give the command that starts it, behind --: `autotune {command} -- python {path} --its --flags`. Or give the "
        f"task in a file of its own, which defines:\n{_signatures(REQUIRED)}\n"
        "`autotune init` writes a commented example. The file was not run."
    )


def task_file(source: str) -> Path:
    """The file of ``path/to/model.py[:name]``, whether it exists or not."""
    return _split(source)[0]


def split_source(source: str) -> tuple[Path, str | None]:
    """The file of ``path/to/model.py[:name]``, and the name.

    Raises:
        TaskError: no such file, or its name is no text.
    """
    path, name = _split(source)
    if not source.isascii() and any("\ud800" <= each <= "\udfff" for each in source):  # bytes that are no UTF-8
        raise TaskError(f"{path}: a name in UTF-8 was expected, since plans and studies hold it. Rename the file.")
    if not path.is_file():
        raise TaskError(f"{path}: no such file. `autotune init {path}` writes a starting file.")
    return path, name


def _split(source: str) -> tuple[Path, str | None]:
    stem, colon, name = source.rpartition(":")
    if colon and name.isidentifier() and not Path(source).exists():
        return Path(stem), name
    return Path(source), None


def _import(path: Path) -> ModuleType:
    """Run the file as ``python path`` would: its folder first on sys.path, under its own name where that is free."""
    path = path.resolve()
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    loaded = sys.modules.get(path.stem)
    free = path.stem not in sys.stdlib_module_names and (
        loaded is None or getattr(loaded, "__file__", None) == str(path)
    )
    name = path.stem if free else f"autotune_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TaskError(f"{path}: not a Python file. Name a file that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with ExitStack() as undone:
        undone.callback(sys.modules.pop, name, None)
        spec.loader.exec_module(module)
        undone.pop_all()
    return module


def _signatures(names: Iterable[str]) -> str:
    return "\n".join(f"    {SIGNATURES[name]}" for name in names)


def _from_functions(module: ModuleType, source: str, inference: bool) -> Task:
    replaced = {"build_dataset"} if hasattr(module, "build_loader") else set()
    required = REQUIRED_OF_INFERENCE if inference else REQUIRED
    missing = [name for name in required if name not in replaced and not hasattr(module, name)]
    if missing:
        infers = missing == ["compute_loss"] and callable(getattr(module, "infer", None))
        hint = "For inference: load_task(…, inference=True), or search with --inference.\n" * infers
        raise TaskError(
            f"{source}: missing {', '.join(missing)}. A task file defines:\n{_signatures(missing)}\n"
            f"{hint}or `task = autotune.Task(...)`. `autotune init` writes a commented example."
        )
    names = {f.name for f in fields(Task)} - {"source", "infers"}
    task = Task(**{name: getattr(module, name) for name in names if hasattr(module, name)}, source=source)
    return task.for_inference() if inference else task


_BINDERS = frozenset({"exec", "globals", "locals", "setattr", "__import__"})
"""Functions by which names come about that nobody reads off the file."""


def bound_names(source: bytes) -> set[str] | None:
    """The names that a file binds in its own scope, whichever branch it takes; None where it may bind any.

    A file that computes gradients when it is run (nanoGPT's ``train.py``, say, which calls ``exec`` too) binds what can
    be read off it.

    Raises:
        SyntaxError: it is no Python.
    """
    tree = ast.parse(source)
    own = list(_own_nodes(tree))
    names = {name for node in own for name in _bound_by(node)}
    if any(isinstance(node, ast.Attribute) and node.attr == "backward" for node in own):
        return names
    may_bind_any = "__getattr__" in names or any(map(_is_dynamic, ast.walk(tree)))
    return None if may_bind_any else names


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Without the bodies of functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _own_nodes(child)


def _bound_by(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
            yield from (name for inner in ast.walk(node) if isinstance(inner, ast.Global) for name in inner.names)
        case ast.Import() | ast.ImportFrom():
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        case ast.Name(ctx=ast.Store()):
            yield node.id


def _is_dynamic(node: ast.AST) -> bool:
    match node:
        case ast.ImportFrom(names=[ast.alias(name="*")]):
            return True
        case ast.Call(func=ast.Name(id="vars"), args=[]):
            return True
        case ast.Name(id=name):
            return name in _BINDERS
        case ast.Attribute(value=ast.Name(id="sys"), attr="modules"):
            return True
    return False
