"""Bad spaces: every technique's row with every poison, and files that are none, for each command that takes one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from .checks import refused
from .core import Complaints, Fault
from .place import Place
from .plans import FILES, bounded
from .scene import task_text

_KIND = "spaces"
_REFUSED = "exit 2, one message, no traceback"
_TECHNIQUES = (
    "batch", "precision", "layers", "checkpointing", "memory_format", "data_loading", "optimizer", "allocator",
)  # fmt: skip
_ROWS = {
    "no choices": "[]",
    "a number": "5",
    "another word": "automatic",
    "a mapping": "{a: b}",
    "an unknown key": "[{warp_drive: 11}]",
    "an unknown value": '[{kind: "\\e[2J\\e]0;t\\a"}]',
    "400 digits": f"[{10**400}]",
}
_VALUES = {
    "a million workers": "data_loading: [{num_workers: 1000000}]",
    "a billion batches ahead": "data_loading: [{num_workers: 1, prefetch_factor: 1000000000}]",
    "negative workers": "data_loading: [{num_workers: -1}]",
    "micro-batch of 0": "batch: [{micro: 0}]",
    "micro-batch of 400 digits": f"batch: [{{micro: {10**400}}}]",
    "not a number": "batch: [{micro: .nan}]",
    "every 0": "checkpointing: [{kind: blocks, every: 0}]",
    "an unknown technique": "warp_drive: auto",
    "a technique of escapes": '"\\e[2J": auto',
    "another version": "schema: autotune/space@9",
}


def faults() -> Iterator[Fault]:
    """Rows, values, files, names."""
    for technique in _TECHNIQUES:
        for name, row in _ROWS.items():
            text = f"schema: autotune/space@1\n{technique}: {row}\n"
            yield Fault(f"{technique}: {name}", _KIND, "local", _REFUSED, partial(_search, content=text))
    for name, row in _VALUES.items():
        head = "" if row.startswith("schema") else "schema: autotune/space@1\n"
        yield Fault(name, _KIND, "local", _REFUSED, partial(_value, content=f"{head}{row}\n"))
    for name, content in FILES.items():
        yield Fault(f"search: {name}", _KIND, "local", _REFUSED, partial(_search, content=content))
    for name in ("missing", "a folder", "binary", "endless", "a pipe", "deep"):
        yield Fault(f"estimate: {name}", _KIND, "local", _REFUSED, partial(_estimate, content=FILES[name]))
    for name, given in {"an unknown preset": "outer", "no name": "", "5,000 characters": "s" * 5_000}.items():
        yield Fault(f"--space: {name}", _KIND, "local", _REFUSED, partial(_named, given=given))


def _prepared(place: Place, content: Any) -> None:
    place.write("model.py", task_text())
    if callable(content):
        path: Path = place.work / "bad.yaml"
        content(path)
        place.expected.add("bad.yaml")
    else:
        place.write("bad.yaml", content)


def _search(place: Place, content: Any) -> Complaints:
    _prepared(place, content)
    arguments = ("search", "model.py", "--executor", "local", "--device", "cpu", "--trials", "1", "--space", "bad.yaml")
    return _nothing_begun(place, refused(place.run(*arguments, prepare=bounded, timeout_s=20), "bad.yaml"))


def _value(place: Place, content: str) -> Complaints:
    """What only the model's facts refuse may be refused once they are known."""
    _prepared(place, content)
    arguments = ("search", "model.py", "--executor", "local", "--device", "cpu", "--trials", "1", "--space", "bad.yaml")
    return refused(place.run(*arguments, timeout_s=20), most_cpu_s=20.0)


def _estimate(place: Place, content: Any) -> Complaints:
    _prepared(place, content)
    arguments = ("estimate", "model.py", "--device", "cpu", "--space", "bad.yaml")
    return refused(place.run(*arguments, prepare=bounded, timeout_s=20), "bad.yaml")


def _named(place: Place, given: str) -> Complaints:
    place.write("model.py", task_text())
    ended = place.run("search", "model.py", "--executor", "local", "--device", "cpu", "--space", given)
    return _nothing_begun(place, refused(ended))


def _nothing_begun(place: Place, found: Complaints) -> Complaints:
    return found + (["a study was begun"] if (place.work / ".autotune").exists() else [])
