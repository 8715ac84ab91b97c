"""The result of a search: its plan, the plan in words, and the files beside it."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import AutotuneError
from ..plan import load_plan
from ..report.printing import print_words
from ..report.show import explain

_WIDTH = 110


@dataclass(frozen=True)
class Documents:
    """A plan, and what belongs to it."""

    plan: str
    """YAML."""
    report: str | None = None
    """As ``autotune show`` prints it."""
    files: dict[str, str] = field(default_factory=dict)
    """What the plan's settings keep beside it: by name, in base64."""


def read_documents(path: Path) -> Documents | None:
    """The plan at ``path`` with what belongs to it; None where there is none that can be read."""
    try:
        plan = load_plan(path)
        text = path.read_text(encoding="utf-8")
    except (AutotuneError, OSError, ValueError):
        return None
    words = io.StringIO()
    print_words(words, explain(plan, Path(path.name), coloured=False), _WIDTH)
    files = {name: base64.b64encode(content).decode() for name, content in plan.settings.files().items()}
    return Documents(text, words.getvalue(), files)
