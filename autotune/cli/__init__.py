"""The command line: what each command is called, takes and says in ``--help``."""

from __future__ import annotations

from .app import app
from .main import main

__all__ = ["app", "main"]
