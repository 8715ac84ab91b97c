"""``Kept``: what a quality process has found so far, in a file from which another goes on if it dies."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from .types import Cuts, JudgeOptions


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    options: JudgeOptions
    found: Cuts


class Kept:
    """The file: it goes on with the same request alone. Where it cannot be written, nothing is kept."""

    def __init__(self, options: JudgeOptions) -> None:
        self._options, self._path = options, Path(options.keep) if options.keep is not None else None
        self.found: Cuts | None = None
        """By an earlier process; None where there was none."""
        with suppress(OSError, ValidationError):
            if self._path is not None:
                stored = _File.model_validate_json(self._path.read_bytes())
                self.found = stored.found if stored.options == options else None

    def write(self, found: Cuts) -> None:
        """Keep this in place of what was there."""
        if self._path is None:
            return
        text = _File(options=self._options, found=found).model_dump_json(exclude_defaults=True, by_alias=True)
        partial = self._path.with_suffix(".partial")
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, self._path)
