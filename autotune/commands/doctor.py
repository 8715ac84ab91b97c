"""``autotune doctor``: what this machine offers."""

from __future__ import annotations

import sys

from ..report.doctor import examine, explain
from ..report.printing import print_json, print_words


def doctor(json: bool) -> None:
    """Print what this machine offers."""
    found = examine()
    if json:
        print_json(found)
    else:
        print_words(sys.stdout, explain(found))
