"""Files of ours: YAML of plain data in, YAML out, and writing that leaves a whole file or none."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import yaml
from pydantic import BaseModel, ValidationError

from .errors import UserError
from .units import printable

try:
    from yaml._yaml import CParser as _Parser  # libyaml's, three times as quick
except ImportError:

    class _Parser(yaml.reader.Reader, yaml.scanner.Scanner, yaml.parser.Parser):  # type: ignore[no-redef]
        def __init__(self, stream: str) -> None:
            yaml.reader.Reader.__init__(self, stream)
            yaml.scanner.Scanner.__init__(self)
            yaml.parser.Parser.__init__(self)


__all__ = [
    "FOLDER",
    "check_output",
    "dump_yaml",
    "explain",
    "hash_of",
    "read_text",
    "read_yaml",
    "replacing",
    "write_text",
]

FOLDER = Path(".autotune")
"""Beside the current directory: the default storage, the trials' output, and the memory models."""

_MAX_BYTES = 2**18
"""Of a file that is read: a plan takes some 2 kB, and so much is parsed and refused in about a second."""
_MOST_PROBLEMS = 20
"""Lines of what is wrong with one file."""
_MOST_SHOWN = 80
"""Characters of a name or a value in such a line."""
_LARGEST = 2**63
"""No number in a file of ours reaches it: neither bytes, nor samples, nor seeds."""
_PREFIX, _SUFFIX = ".autotune-", ".tmp"
"""Of names that files have while they are written."""

_IN_YAML = {
    "tuple_type": "a list was expected",
    "model_type": "a mapping was expected",
    "too_short": "it must not be empty",
}
"""What is wrong, by pydantic's name for it, where pydantic's words are of Python's types."""

UNION_TAGS = ("(auto)", "(list)", "(setting)", "(directive)")
"""Names of a union's members, which pydantic puts into the place of an error and no file has."""


def dump_yaml(data: dict[str, Any]) -> str:
    """YAML with keys in order and rows of plain values on one line each."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def hash_of(path: Path) -> str:
    """``sha256:`` and the digest of a file's content.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def read_text(path: Path, what: str, error: type[UserError]) -> str:
    """The text of a regular file of at most 256 KiB: neither a device without an end nor a pipe is waited for.

    Args:
        path: what to read.
        what: it should be, such as ``plan``.
        error: raised for anything else.

    Raises:
        FileNotFoundError: there is no such file.
        error: it cannot be read, is no regular file, is too large, or is no UTF-8.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            content = file.read(_MAX_BYTES + 1) if is_regular else b""
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as reason:  # a null byte in the path is the latter
        said = getattr(reason, "strerror", None) or reason
        raise error(f"{_short(str(path))}: cannot be read as a {what}: {said}.") from None
    if not is_regular:
        raise error(f"{path}: cannot be read as a {what}: a regular file was expected.")
    if len(content) > _MAX_BYTES:
        raise error(f"{path}: cannot be read as a {what}: it holds more than {_MAX_BYTES} bytes.")
    try:
        return content.decode()
    except UnicodeDecodeError as reason:
        raise error(f"{path}: cannot be read as a {what}: {reason}.") from None


def write_text(path: Path, text: str, error: type[UserError], option: str = "-o") -> None:
    """Write a file atomically (another file in its folder, fsync, then its name).

    Raises:
        error: the path cannot be written; what stood there before is untouched.
    """
    with _told(path, error, option):
        target = _target(path)
        _sweep(target.parent)
        if _write_unlisted(target, text):
            return
    with replacing(path, error, option) as temporary, _told(path, error, option), temporary.open("wb") as file:
        _write(file, text)


@contextmanager
def replacing(path: Path, error: type[UserError], option: str = "-o") -> Iterator[Path]:
    """An empty file beside ``path``, to be filled; it takes ``path``'s place once the body has ended well.

    What a killed process left of one is removed by the next that writes there.

    Args:
        path: what is to be there in the end.
        error: raised when the path cannot be written; what stood there before is untouched.
        option: the command's, that chooses another path.
    """
    with _told(path, error, option):
        target = _target(path)
        _sweep(target.parent)
        handle, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_SUFFIX, dir=target.parent)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # it is not swept while this process lives
        yield Path(name)
        with _told(path, error, option):
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, target)
    except BaseException:
        with suppress(OSError):  # its folder may be gone
            os.unlink(name)
        raise
    finally:
        os.close(handle)


def _target(path: Path) -> Path:
    """Where a file is written, through a link into what it names; its folder is made."""
    target = path.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _write_unlisted(target: Path, text: str) -> bool:
    """Write a file that no folder lists until it is whole, so that a killed process leaves nothing.

    Returns:
        False where the file system or the kernel has no such files.

    Source: open(2), O_TMPFILE
    """
    try:
        handle = os.open(target.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    except (AttributeError, OSError):
        return False
    with open(handle, "wb") as file:
        fcntl.flock(handle, fcntl.LOCK_EX)
        _write(file, text)
        try:
            _link(handle, target)
        except FileExistsError:  # a link replaces nothing: for a moment the file needs a name of its own
            name = target.with_name(f"{_PREFIX}{os.getpid()}{_SUFFIX}")
            _link(handle, name)
            os.replace(name, target)
        except OSError:
            return False
    return True


def _link(handle: int, target: Path) -> None:
    os.link(f"/proc/self/fd/{handle}", target, src_dir_fd=handle, follow_symlinks=True)  # linkat follows, link does not


def _write(file: IO[bytes], text: str) -> None:
    file.write(text.encode())
    file.flush()
    os.fsync(file.fileno())


def _sweep(folder: Path) -> None:
    """Remove what processes that were killed had begun to write."""
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError), path.open("rb") as file:  # another's, or gone meanwhile
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def check_output(path: Path, taken: Mapping[str, Path | None], error: type[UserError], option: str = "-o") -> None:
    """Find out, before anything runs, that a result cannot be written or would take the place of something else.

    Args:
        path: where it would go.
        taken: what is there already and must stay, by what it is.
        error: raised if so it is.
        option: the command's, that chooses another path.
    """
    with _told(path, error, option):
        real = Path(os.path.realpath(path))  # Path.resolve raises for a link to itself
        if real.is_symlink() or (path.exists() and not path.is_file()):
            what = "a folder" if path.is_dir() else "no regular file"
            raise error(f"{path}: a file was expected, but it is {what}. Choose another path with {option}.")
        for name, other in taken.items():
            if other is not None and str(real) == os.path.realpath(other):
                raise error(f"{path}: that is {name} itself. Choose another path with {option}.")
        if real.is_relative_to(FOLDER.resolve()):
            raise error(f"{path}: {FOLDER} holds the studies. Choose another path with {option}.")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=real.parent):
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
    """A YAML mapping of plain data: no tags, no anchors (a billion laughs), no duplicate keys, no number that nothing
    has, at most 256 KiB.

    Raises:
        error: anything else, with the place.
    """
    if len(text) > _MAX_BYTES:
        raise error(f"{source}: at most {_MAX_BYTES} characters of YAML were expected, but got {len(text)}.")
    try:
        data = _PlainLoader(text).get_single_data()
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as reason:  # the latter two from its numbers
        raise error(f"{source}: not plain YAML: {printable(' '.join(str(reason).split()))}.") from None
    if not isinstance(data, dict):
        raise error(f"{source}: expected a mapping with `schema`, but got {type(data).__name__}.")
    return data


def explain(error: ValidationError, source: str, root: type[BaseModel]) -> str:
    """A validation error of a ``root`` model, one line a problem: where, what was wanted, what was got; the first few
    where there are many."""
    lines: list[str] = []
    for problem in error.errors(include_url=False, include_context=False):
        if problem["type"] == "too_short" and problem["input"]:  # its items are at fault, and have lines of their own
            continue
        if len(lines) == _MOST_PROBLEMS:
            lines.append(f"{source}: … and more: {error.error_count()} problems in all")
            break
        location = tuple(part for part in problem["loc"] if part not in UNION_TAGS)
        where = ".".join(_short(str(part)) for part in location)
        got = problem["input"]
        known = _known_keys(location, root) if problem["type"] == "extra_forbidden" else None
        message = f"unknown key. Use one of: {', '.join(known)}" if known else problem["msg"]
        message = _IN_YAML.get(problem["type"], message).removeprefix("Value error, ")
        is_told = isinstance(got, str) and repr(got) in message
        is_shown = isinstance(got, (str, int, float, bool)) and not known and not is_told
        shown = f", but got {_short(repr(got))}" if is_shown else ""
        lines.append(f"{source}: {where}: {_short(message, 400)}{shown}")
    return "\n".join(lines)


def _short(text: str, most: int = _MOST_SHOWN) -> str:
    """Its beginning, with nothing that a terminal would act on."""
    return printable(text if len(text) <= most else f"{text[:most]}…")


def _known_keys(location: tuple[int | str, ...], root: type[BaseModel]) -> list[str] | None:
    """The keys that are valid beside an unknown one, walking the models from ``root`` down."""
    model: type[BaseModel] | None = root
    for part in (each for each in location[:-1] if isinstance(each, str)):  # a row of a list is of the list's model
        fields = model.model_fields if model else {}
        found = next((f for n, f in fields.items() if part in (n, f.alias)), None)
        candidates = [found.annotation, *getattr(found.annotation, "__args__", ())] if found else []
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
    return [f.alias or n for n, f in model.model_fields.items()] if model else None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class _PlainLoader(yaml.composer.Composer, yaml.constructor.SafeConstructor, yaml.resolver.Resolver, _Parser):
    """safe_load, with anchors, duplicate keys and numbers out of all bounds refused: none stands in a file of ours."""

    def __init__(self, stream: str) -> None:
        _Parser.__init__(self, stream)
        yaml.composer.Composer.__init__(self)
        yaml.constructor.SafeConstructor.__init__(self)
        yaml.resolver.Resolver.__init__(self)

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event: Any = self.peek_event()
            raise yaml.constructor.ConstructorError(None, None, "aliases are not allowed", event.start_mark)
        return super().compose_node(parent, index)

    def construct_number(self, node: Any) -> float:
        """One that something here could be."""
        is_whole = node.tag.endswith(":int")
        value: float = self.construct_yaml_int(node) if is_whole else self.construct_yaml_float(node)
        if not abs(value) < _LARGEST:  # NaN neither
            message = f"no number that anything here has: {_short(node.value, 20)}"
            raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
        return value

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        if len(keys) != len(set(map(str, keys))):
            raise yaml.constructor.ConstructorError(None, None, "a key stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


for _kind in ("int", "float"):
    _PlainLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", _PlainLoader.construct_number)  # type: ignore[type-var]


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
