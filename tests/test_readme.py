"""What the README and the docs show exists, parses, and says what the files it quotes say."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
import yaml

import autotune
from autotune.batch.jobs import Jobs
from autotune.bundle import Bundle
from autotune.cli import app
from autotune.search_spaces import SearchSpace

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_INLINE = re.compile(r"`(autotune [a-z][^`]*)`")


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """The page's code blocks in these languages, without their indentation."""
    for indent, language, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        if language in languages:
            yield "".join(line.removeprefix(indent) for line in text.splitlines(keepends=True))


def shell_lines(page: Path) -> Iterator[str]:
    for block in blocks(page, "sh", "console"):
        joined = block.replace("\\\n", " ")
        yield from (line.partition("  #")[0].removeprefix("$ ").strip() for line in joined.splitlines())


def commands(page: Path) -> Iterator[str]:
    """Each ``autotune …`` that the page shows, in blocks and in running text."""
    prose = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    for line in (*shell_lines(page), *_INLINE.findall(prose)):
        if line.startswith("autotune ") and "…" not in line and "COMMAND" not in line:
            yield line


def every(of) -> list:
    return [pytest.param(page, found, id=f"{page.name}: {found[:50]}") for page in PAGES for found in of(page)]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    for link in _LINK.findall(text):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link} is not there"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link} has no such heading"


@pytest.mark.parametrize(("page", "line"), every(commands))
def test_commands_parse(page: Path, line: str):
    """Command, options and values as the command line takes them; nothing runs."""
    _, name, *rest = shlex.split(line)
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group) or hasattr(group, "commands")
    assert name in group.commands, f"{page.name}: autotune has no command {name}"
    if rest and "--help" not in rest:
        group.commands[name].make_context(name, rest)


def targets(page: Path) -> Iterator[str]:
    for line in shell_lines(page):
        yield from re.findall(r"^make (\w+)", line)


@pytest.mark.parametrize(("page", "target"), every(targets))
def test_make_knows_its_targets(page: Path, target: str):
    subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)


def yaml_blocks(page: Path) -> Iterator[str]:
    yield from blocks(page, "yaml")


@pytest.mark.parametrize(("page", "text"), every(yaml_blocks))
def test_yaml_is_what_its_schema_says(page: Path, text: str):
    match yaml.safe_load(text).get("schema"):
        case "autotune/space@1":
            SearchSpace.from_yaml(text, page.name)
        case "autotune/jobs@1":
            Jobs.model_validate(yaml.safe_load(text))
        case "autotune/bundle@1":
            Bundle.model_validate(yaml.safe_load(text))
        case _:
            autotune.Plan.from_yaml(text, page.name)


def python_blocks(page: Path) -> Iterator[str]:
    yield from blocks(page, "python")


@pytest.mark.parametrize(("page", "text"), every(python_blocks))
def test_python_compiles_and_names_what_exists(page: Path, text: str):
    compile(text, page.name, "exec")
    for name in re.findall(r"\bautotune\.(\w+)\b(?!\.| import)", text):
        assert name in autotune.__all__, f"{page.name}: autotune has no public name {name}"


def test_the_shown_plan_is_the_golden_file():
    shown = next(blocks(ROOT / "docs" / "use" / "plan.md", "yaml"))
    assert shown == (ROOT / "tests" / "golden" / "plan.yaml").read_text(encoding="utf-8")
