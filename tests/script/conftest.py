"""What tests of scripts share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from script_lines import run_here


@pytest.fixture
def write(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """A script of these lines, behind the ``HEAD`` of the test's file."""

    def write(body: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(request.module.HEAD + body)
        return path

    return write


@pytest.fixture
def run(write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run such a script here, with settings applied, and have what it defined."""
    return lambda body, **settings: run_here(write(body), monkeypatch, **settings)
