"""Hash of a task's code, since two models may have the same parameters and compute different functions."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path


def code_hash(path: Path) -> str:
    """Hash of a file and of the modules in its folder that it imports, directly or through each other.

    Imports are read from the source, inside functions too; what is imported by a name made at run time is not seen.

    Raises:
        OSError: the file cannot be read.
    """
    folder = path.resolve().parent
    found: dict[Path, bytes] = {}
    left = [path.resolve()]
    while left:
        file = left.pop()
        if file not in found:
            found[file] = file.read_bytes()
            left += _imported(file, found[file], folder)
    digest = hashlib.sha256()
    for file in sorted(found):
        digest.update(f"{file.relative_to(folder)}\0{len(found[file])}\0".encode())
        digest.update(found[file])
    return digest.hexdigest()


def _imported(file: Path, source: bytes, folder: Path) -> Iterator[Path]:
    """Files of the folder that a file imports."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # the trial says so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(folder, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = folder if not node.level else file.parents[node.level - 1]
            if base.is_relative_to(folder):
                for alias in node.names:
                    yield from _files(base, ".".join(filter(None, (node.module, alias.name))))


def _files(base: Path, name: str) -> Iterator[Path]:
    """What ``import name`` reads below a folder: each package on the way, and the module; a last part may be a name in
    a module."""
    place = base
    for part in name.split("."):
        place = place / part
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                yield file.resolve()
