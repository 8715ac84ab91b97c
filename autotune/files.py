"""Files of ours: YAML of plain data in, YAML out, and writing that leaves a whole file or none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from .errors import UserError

__all__ = ["FOLDER", "check_output", "dump_yaml", "explain", "read_yaml", "replacing", "write_text"]

FOLDER = Path(".autotune")
"""Beside the current directory: the default storage, the trials' output, and the laws of memory."""

_MAX_YAML_BYTES = 2**20

UNION_TAGS = ("(auto)", "(list)")
"""Names of a union's members, which pydantic puts into the place of an error and no file has."""


def dump_yaml(data: dict[str, Any]) -> str:
    """YAML with keys in order and rows of plain values on one line each."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def write_text(path: Path, text: str, error: type[UserError], option: str = "-o") -> None:
    """Write a file atomically (temporary file beside it, fsync, rename).

    Raises:
        error: the path cannot be written; what stood there before is untouched.
    """
    with (
        replacing(path, error, option) as temporary,
        _told(path, error, option),
        temporary.open("w", encoding="utf-8") as file,
    ):
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacing(path: Path, error: type[UserError], option: str = "-o") -> Iterator[Path]:
    """An empty file beside ``path``, to be filled; it takes ``path``'s place once the body has ended well.

    Args:
        path: what is to be there in the end.
        error: raised when the path cannot be written; what stood there before is untouched.
        option: the command's, that chooses another path.
    """
    with _told(path, error, option):
        target = path.resolve()  # through a link, into what it names
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".autotune-", dir=target.parent)
        os.close(handle)
    try:
        yield Path(name)
        with _told(path, error, option):
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def check_output(path: Path, taken: Mapping[str, Path | None], error: type[UserError], option: str = "-o") -> None:
    """Find out, before anything runs, that a result cannot be written or would take the place of something else.

    Args:
        path: where it would go.
        taken: what is there already and must stay, by what it is.
        error: raised if so it is.
        option: the command's, that chooses another path.
    """
    with _told(path, error, option):
        if path.exists() and not path.is_file():
            what = "a folder" if path.is_dir() else "no regular file"
            raise error(f"{path}: a file was expected, but it is {what}. Choose another path with {option}.")
        for name, other in taken.items():
            if other is not None and path.resolve() == other.resolve():
                raise error(f"{path}: that is {name} itself. Choose another path with {option}.")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass


@contextmanager
def _told(path: Path, error: type[UserError], option: str) -> Iterator[None]:
    try:
        yield
    except OSError as reason:
        raise error(
            f"{path}: cannot be written: {reason.strerror or reason}. Choose another path with {option}."
        ) from None


def read_yaml(text: str, source: str, error: type[UserError]) -> dict[str, Any]:
    """A YAML mapping of plain data: no tags, no anchors (a billion laughs), no duplicate keys, at most 1 MiB.

    Raises:
        error: anything else, with the place.
    """
    if len(text) > _MAX_YAML_BYTES:
        raise error(f"{source}: at most {_MAX_YAML_BYTES} characters of YAML were expected, but got {len(text)}.")
    try:
        data = yaml.load(text, Loader=_PlainLoader)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as reason:  # the latter two from its numbers
        raise error(f"{source}: not plain YAML: {' '.join(str(reason).split())}.") from None
    if not isinstance(data, dict):
        raise error(f"{source}: expected a mapping with `schema`, but got {type(data).__name__}.")
    return data


def explain(error: ValidationError, source: str, root: type[BaseModel]) -> str:
    """A validation error of a ``root`` model, one line a problem: where, what was wanted, what was got."""
    lines = []
    for problem in error.errors(include_url=False):
        if problem["type"] == "too_short" and problem["input"]:  # its items are at fault, and have lines of their own
            continue
        location = tuple(part for part in problem["loc"] if part not in UNION_TAGS)
        where = ".".join(map(str, location))
        got = problem["input"]
        known = _known_keys(location, root) if problem["type"] == "extra_forbidden" else None
        message = f"unknown key. Use one of: {', '.join(known)}" if known else problem["msg"]
        shown = f", but got {got!r}" if isinstance(got, (str, int, float, bool)) and not known else ""
        lines.append(f"{source}: {where}: {message.removeprefix('Value error, ')}{shown}")
    return "\n".join(lines)


def _known_keys(location: tuple[int | str, ...], root: type[BaseModel]) -> list[str] | None:
    """The keys that are valid beside an unknown one, walking the models from ``root`` down."""
    model: type[BaseModel] | None = root
    for part in location[:-1]:
        fields = model.model_fields if model else {}
        found = next((f for n, f in fields.items() if part in (n, f.alias)), None)
        candidates = [found.annotation, *getattr(found.annotation, "__args__", ())] if found else []
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
    return [f.alias or n for n, f in model.model_fields.items()] if model else None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class _PlainLoader(yaml.SafeLoader):
    """safe_load, with anchors and duplicate keys refused: neither stands in a file of ours."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, "aliases are not allowed", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        if len(keys) != len(set(map(str, keys))):
            raise yaml.constructor.ConstructorError(None, None, "a key stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, int | float) for one in value)


class _Dumper(yaml.SafeDumper):
    """Rows of plain values on one line each, as people write them."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> Any:
        flat = all(not isinstance(value, (dict, list)) or _are_numbers(value) for value in mapping.values())
        return super().represent_mapping(tag, mapping, flow_style=flat and bool(mapping))

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> Any:
        return super().represent_sequence(tag, sequence, flow_style=_are_numbers(sequence) or flow_style)

    def ignore_aliases(self, data: Any) -> bool:
        return True
