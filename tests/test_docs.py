"""What docs/ show is what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tables import PAGES, filled


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_pages_tables_are_of_the_newest_rows(page: Path):
    """`python -m benchmarks.tables` writes them anew."""
    text = page.read_text(encoding="utf-8")
    assert "<!-- table: " in text
    assert text == filled(text)
