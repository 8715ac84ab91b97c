"""The command line: what each command is called, takes and says in ``--help``."""

from __future__ import annotations

from .main import app, main

__all__ = ["app", "main"]
