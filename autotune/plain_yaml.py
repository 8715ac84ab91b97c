"""YAML of plain data, as files of ours hold it: what may stand in it, how it is written, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from .errors import UserError
from .files import MAX_BYTES
from .units import printable, shortened

try:
    from yaml._yaml import CParser as _Parser  # libyaml's, three times as quick
except ImportError:

    class _Parser(yaml.reader.Reader, yaml.scanner.Scanner, yaml.parser.Parser):  # type: ignore[no-redef]
        def __init__(self, stream: str) -> None:
            yaml.reader.Reader.__init__(self, stream)
            yaml.scanner.Scanner.__init__(self)
            yaml.parser.Parser.__init__(self)


_MOST_PROBLEMS = 20
"""Lines of what is wrong with one file."""
_LARGEST = 2**63
"""No number in a file of ours reaches it: neither bytes, nor samples, nor seeds."""
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


def read_yaml(text: str, source: str, error: type[UserError]) -> dict[str, Any]:
    """A YAML mapping of plain data: no tags, no anchors (a billion laughs), no duplicate keys, no number that nothing
    has, at most 256 KiB.

    Raises:
        error: anything else, with the place.
    """
    if len(text) > MAX_BYTES:
        raise error(f"{source}: at most {MAX_BYTES} characters of YAML were expected, but got {len(text)}.")
    try:
        data = _PlainLoader(text).get_single_data()
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as reason:  # the latter two from its numbers
        said = printable(" ".join(str(reason).split())).replace('in "<unicode string>", ', "at ")
        raise error(f"{source}: not plain YAML: {said}.") from None
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
        where = ".".join(shortened(str(part)) for part in location)
        got = problem["input"]
        known = _known_keys(location, root) if problem["type"] == "extra_forbidden" else None
        message = f"unknown key. Use one of: {', '.join(known)}" if known else problem["msg"]
        message = _IN_YAML.get(problem["type"], message).removeprefix("Value error, ")
        is_told = isinstance(got, str) and repr(got) in message
        is_shown = isinstance(got, (str, int, float, bool)) and not known and not is_told
        shown = f", but got {shortened(repr(got))}" if is_shown else ""
        lines.append(f"{source}: {where}: {shortened(message, 400)}{shown}")
    return "\n".join(lines)


def _known_keys(location: tuple[int | str, ...], root: type[BaseModel]) -> list[str] | None:
    """The keys that are valid beside an unknown one, walking the models from ``root`` down."""
    model: type[BaseModel] | None = root
    for part in (each for each in location[:-1] if isinstance(each, str)):  # a row of a list is of the list's model
        fields = model.model_fields if model else {}
        found = next((f for n, f in fields.items() if part in (n, f.alias)), None)
        candidates = [found.annotation, *getattr(found.annotation, "__args__", ())] if found else []
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
    return [f.alias or n for n, f in model.model_fields.items()] if model else None


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
            message = f"no number that anything here has: {shortened(node.value, 20)}"
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
