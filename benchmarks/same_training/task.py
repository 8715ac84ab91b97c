"""What a search says in its plan of the script that it was found for: a plan by hand has nothing of it."""

from __future__ import annotations

import sys
from typing import Any

from autotune.commands.where import Where
from autotune.searches.options import SearchOptions
from autotune.searches.requests import inspect
from autotune.searches.time_budget import TimeBudget

from .styles import Style


def task_of(style: Style) -> dict[str, Any]:
    """A plan's section ``task``.

    Raises:
        TaskError: a search would not read the script.
    """
    command = (sys.executable, *style.words)
    options = SearchOptions(task=style.words[0], command=command, device="cpu", scratch="empty")
    with Where("local", is_script=True).open(style.words[0], "cpu") as executor:
        facts = inspect(options, executor, TimeBudget(60.0, None))
    assert facts.identity is not None, "it has been read just now"
    identity = facts.identity.model_dump(mode="json")
    return {"source": style.words[0], "fingerprint": facts.fingerprint, "identity": identity}
