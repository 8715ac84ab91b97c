"""What this package is installed as, and another package of the same import name, which may be in its way.

The distribution is called ``autotune-plan``; it is imported as ``autotune``, and so is its command. PyPI's ``autotune``
is a hyperparameter tuner of 2018 (https://github.com/vzhong/autotune). Installed into one environment, each of the two
overwrites ``autotune/__init__.py`` and the command of the other.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

NAME = "autotune-plan"
_OTHER = "autotune"
_ITS_FILE = "tuner.py"
"""A file of the other's, which has none of that name here."""
_FOLDER = Path(__file__).parent


def conflict() -> str | None:
    """What to do where the other's files lie among those of this package; None where they do not."""
    if not os.path.exists(_FOLDER / _ITS_FILE):
        return None
    return (
        f"PyPI's package {_OTHER} (another project, of 2018) is installed in the same folder as {NAME}, {_FOLDER}, and "
        f"each overwrites files of the other. Uninstall both, then install {NAME} again: "
        f"{sys.executable} -m pip uninstall {_OTHER} {NAME}"
    )


def check_is_whole() -> None:
    """End the process with code 1 where ``import autotune`` gives the other package."""
    found = sys.modules.get(__package__ or "autotune")
    if not hasattr(found, "__version__"):
        sys.exit(f"autotune: {conflict() or f'{found} is not the package that this command belongs to.'}")


def requirement(extra: str | None = None) -> str:
    """What to give to ``pip install`` for this same package, from where it was installed here.

    Args:
        extra: one of its optional groups of dependencies, as ``service``.

    Returns:
        Quoted for a shell: ``'autotune-plan[service]'``, with ``@`` and an address where it came from one, or
        ``-e '/folder[service]'`` of an editable checkout.
    """
    extras, origin = f"[{extra}]" if extra else "", _origin()
    address = origin.get("url", "")
    if origin.get("dir_info", {}).get("editable"):
        return f"-e '{address.removeprefix('file://')}{extras}'"
    if address and "vcs_info" in origin:
        address = f"{origin['vcs_info']['vcs']}+{address}@{origin['vcs_info']['commit_id']}"
    return f"'{NAME}{extras} @ {address}'" if address else f"'{NAME}{extras}'"


def _origin() -> dict[str, Any]:
    """Empty where it came from an index, or was not installed.

    Source: https://packaging.python.org/en/latest/specifications/direct-url/
    """
    from importlib.metadata import PackageNotFoundError, distribution  # takes 20 ms, and `import autotune` has no use

    try:
        text = distribution(NAME).read_text("direct_url.json")
    except PackageNotFoundError:
        return {}
    origin: dict[str, Any] = json.loads(text or "{}")
    return origin
