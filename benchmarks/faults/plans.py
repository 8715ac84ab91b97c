"""Bad plans: every field with every poison through ``show``, and files that are none through every command."""

from __future__ import annotations

import copy
import os
import resource
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from .checks import clean, refused
from .core import Complaints, Fault
from .place import ROOT, Place

_KIND = "plans"
_PLAN = ROOT / "tests" / "golden" / "plan.yaml"
_ESCAPES = "\x1b]0;title\x07\x1b[2J\x9b31m"
_HUGE = 10**400
_NUMBERS = {"400 digits": _HUGE, "negative": -1, "nan": float("nan"), "infinite": float("inf"), "a list": [1]}
_MAY_HOLD = (0, 2)
_REFUSED = "exit 2, one message, no traceback"
_MEMORY_BYTES = 2 * 2**30


def bounded() -> None:
    """What reads an endless file must not take the machine with it."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


def faults() -> Iterator[Fault]:
    """Fields, unknown keys, values out of reach, files."""
    plan = yaml.safe_load(_PLAN.read_text())
    for path, value in _leaves(plan):
        name = ".".join(map(str, path))
        for poison, bad in _poisons(value).items():
            text = yaml.dump(_with(plan, path, bad), sort_keys=False)
            codes = _codes(value, poison)
            yield Fault(f"{name}: {poison}", _KIND, "none", _told(codes), partial(_show, text=text, codes=codes))
    for path in _sections(plan):
        name = ".".join(map(str, path)) or "the whole"
        text = yaml.dump(_with(plan, (*path, "warp_drive"), 11), sort_keys=False)
        yield Fault(f"{name}: unknown key", _KIND, "none", _REFUSED, partial(_show, text=text, codes=(2,)))
    for what, settings in _OUT_OF_REACH.items():
        for command in (("show",), ("run", "--", "true")):
            name = f"{what}, {command[0]}"
            yield Fault(name, _KIND, "none", _REFUSED, partial(_command, command=command, settings=settings))
    yield from _files()


_OUT_OF_REACH = {
    "a million workers": "data_loading: {num_workers: 1000000}",
    "a billion batches ahead": "data_loading: {num_workers: 1, prefetch_factor: 1000000000}",
    "micro-batch of 400 digits": f"batch: {{micro: {_HUGE}}}",
    "accumulation of 400 digits": f"batch: {{micro: 1, accumulate: {_HUGE}}}",
    "every 400 digits": f"checkpointing: {{kind: blocks, every: {_HUGE}}}",
    "block of 400 digits": f"checkpointing: {{kind: chosen, blocks: [{_HUGE}]}}",
    "workers of 400 digits": f"data_loading: {{num_workers: {_HUGE}}}",
    "negative workers": "data_loading: {num_workers: -1}",
    "no settings at all": "null",
    "settings that are a list": "[1, 2]",
    "settings that are a word": "fast",
}


def _told(codes: tuple[int, ...]) -> str:
    return _REFUSED if codes == (2,) else "no raw escape character, no traceback"


def _codes(value: Any, poison: str) -> tuple[int, ...]:
    """A wrong type is refused; text that a terminal would misread may also be shown, escaped."""
    if poison in ("a list", "a mapping", "400 digits", "nan", "infinite", "a number", "null in a list"):
        return (2,)
    return _MAY_HOLD


def _poisons(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"a number": 7, "a list": [1], "escapes": _ESCAPES}
    if isinstance(value, int | float):
        return dict(_NUMBERS)
    if value[:1].isdigit() and value[-1] in "Bx":  # a size or a ratio
        return {"400 digits": _HUGE, "nan": float("nan"), "negative": f"-{value}", "escapes": f"{value}{_ESCAPES}"}
    return {"escapes": f"{value}{_ESCAPES}", "a list": [value], "a mapping": {"a": value}}


def _leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _leaves(value, (*path, key))
    else:
        yield path, data


def _sections(data: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _sections(value, (*path, key))


def _with(data: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(data)
    place: Any = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


def _show(place: Place, text: str, codes: tuple[int, ...]) -> Complaints:
    place.write("plan.yaml", text)
    ended = place.run("show", "plan.yaml")
    return refused(ended) if codes == (2,) else clean(ended, codes)


def _command(place: Place, command: tuple[str, ...], settings: str) -> Complaints:
    place.write("plan.yaml", f"schema: autotune/plan@1\nsettings:\n  {settings}\n")
    return refused(place.run(command[0], "plan.yaml", *command[1:]), "plan.yaml")


def _make_file(place: Place, content: str | bytes | Callable[[Path], object]) -> None:
    path = place.work / "bad.yaml"
    if callable(content):
        content(path)
    else:
        place.write("bad.yaml", content)
    place.expected.add("bad.yaml")


_LAUGHS = "a: &a [ha, ha]\n" + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}]\n" for a, b in pairwise("abcdefghijkl"))

FILES: dict[str, str | bytes | Callable[[Path], object]] = {
    "missing": lambda path: None,
    "empty": "",
    "a folder": lambda path: path.mkdir(),
    "binary": bytes(range(256)) * 64,
    "null bytes": "\0" * 4096,
    "utf-16": "schema: autotune/plan@1\n".encode("utf-16"),
    "a number": "5\n",
    "a list": "- a\n- b\n",
    "malformed": "settings: [",
    "deep": "[" * 100_000,
    "deep mapping": "".join(f"{' ' * n}a:\n" for n in range(1_000)),
    "billion laughs": _LAUGHS,
    "alias to itself": "a: &a [*a]\n",
    "python object": "schema: !!python/object/apply:os.system ['touch hacked']\n",
    "a key twice": "schema: autotune/plan@1\nschema: autotune/plan@1\n",
    "two documents": "schema: autotune/plan@1\n---\nschema: autotune/plan@1\n",
    "980 kB of unknown keys": "".join(f"k{n:06}: 1\n" for n in range(89_000)),
    "2 MB of comments": "# nothing\n" * 200_000,
    "a key of 1 MB": f"{'k' * 1_000_000}: 1\n",
    "escapes as keys": '"\\e]0;t\\a\\e[2J": 1\n',
    "escapes in a tag": "schema: !\x7f\x1b[2J x\n",
    "another version": "schema: autotune/plan@9\nsettings: {}\n",
    "a date": "2001-01-01\n",
    "a number of 5000 digits": f"schema: {'9' * 5000}\n",
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "a pipe": lambda path: os.mkfifo(path),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nowhere.yaml"),
}
_COMMANDS: dict[str, tuple[str, ...]] = {
    "show": ("show", "bad.yaml"),
    "verify": ("verify", "bad.yaml", "--executor", "local"),
    "run": ("run", "bad.yaml", "--", "true"),
}


def _files() -> Iterator[Fault]:
    for name, content in FILES.items():
        for command, arguments in _COMMANDS.items():
            yield Fault(f"{command}: {name}", _KIND, "none", _REFUSED, partial(_file, content=content, run=arguments))
    reason = "root may read every file: a mode says nothing here" if os.geteuid() == 0 else ""
    do = partial(_file, content=_unreadable, run=_COMMANDS["show"])
    yield Fault("show: unreadable", _KIND, "none", _REFUSED, do, undefended=reason)


def _unreadable(path: Path) -> None:
    path.write_text("schema: autotune/plan@1\nsettings: {}\n")
    path.chmod(0)


def _file(place: Place, content: Any, run: tuple[str, ...]) -> Complaints:
    _make_file(place, content)
    found = refused(place.run(*run, prepare=bounded, timeout_s=15), "bad.yaml")
    return found + (["it ran what the file holds"] if (place.work / "hacked").exists() else [])
