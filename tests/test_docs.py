"""What docs/ show is what was measured."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.picture import PICTURE, shown
from benchmarks.tables import PAGES, filled


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_pages_tables_are_of_the_newest_rows(page: Path):
    """`python -m benchmarks.tables` writes them anew."""
    text = page.read_text(encoding="utf-8")
    assert "<!-- table: " in text
    assert text == filled(text)


def test_the_index_names_every_page_and_says_nothing_twice():
    docs = PICTURE.parent
    index = (docs / "README.md").read_text(encoding="utf-8")
    lines = [line for line in index.splitlines() if line]
    assert len(lines) == len(set(lines))
    pages = (str(page.relative_to(docs)) for page in docs.rglob("*.md"))
    assert [page for page in pages if f"({page})" not in index] == ["README.md"]


def test_the_picture_is_of_the_readmes_search():
    """`python -m benchmarks.picture` draws it anew."""
    drawn = re.findall(r"<text class=\"terminal-\d+-r\d[^>]*>([^<]*)</text>", PICTURE.read_text(encoding="utf-8"))
    assert "".join(html.unescape("".join(drawn)).split()) == "".join(shown().split())


@pytest.mark.slow
def test_the_lines_that_show_fit_train_and_print_what_is_shown():
    """But for the numbers, which are those of a process and of its device's speeds; and for what goes by them: the
    blocks, and what is most at the peak."""
    text = (PICTURE.parent / "use" / "fit.md").read_text(encoding="utf-8")
    code, output = re.findall(r"```(?:python|text)\n(.*?)```", text, re.S)[:2]
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = [
        re.split(r"[0-9]|: (?:activation|temporary)", line.partition(", chosen")[0])[0] for line in output.splitlines()
    ]
    assert [line[: len(begins)] for line, begins in zip(ran.stdout.splitlines(), said, strict=True)] == said
    assert " 2 GiB, chosen: memory-saving layers" in ran.stdout
