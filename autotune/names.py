"""``bound_names``: what a Python file defines at its top level, read without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

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
