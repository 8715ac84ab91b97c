"""What this package is installed as, and another package of the same import name, which may be in its way.

The distribution is called ``autotune-plan``; it is imported as ``autotune``, and so is its command. PyPI's ``autotune``
is a hyperparameter tuner of 2018 (https://github.com/vzhong/autotune). Installed into one environment, each of the two
overwrites ``autotune/__init__.py`` and the command of the other.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

NAME, VERSION = "autotune-plan", "0.1.0"
_OTHER = "autotune"
_ITS_FILE = "tuner.py"
"""A file of the other's; this package has none of that name in this folder."""
_FOLDER = Path(__file__).parent


def conflict() -> str | None:
    """What is wrong and what to do, if the other's files are in this package's folder; None if they are not."""
    if not (_FOLDER / _ITS_FILE).exists():
        return None
    return (
        f"PyPI's package {_OTHER} (another project, of 2018) is installed in the same folder as {NAME}, {_FOLDER}, and "
        f"each overwrites files of the other. Uninstall both, then install {NAME} again: "
        f"{sys.executable} -m pip uninstall {_OTHER} {NAME}"
    )


def check_is_whole() -> None:
    """End the process with code 1 if ``autotune/__init__.py`` is the other package's."""
    if (found := conflict()) and not hasattr(sys.modules["autotune"], "__version__"):
        sys.exit(f"autotune: {found}")


def requirement(extra: str | None = None) -> str:
    """What to write after ``pip install`` to install this package from the same place as here.

    Args:
        extra: one of its optional groups of dependencies, as ``service``.

    Returns:
        Quoted for a shell: ``'autotune-plan[service]'`` from an index, ``'autotune-plan[service] @ ADDRESS'`` from an
        address, ``-e '/folder[service]'`` from an editable checkout.
    """
    extras, origin = f"[{extra}]" if extra else "", _origin()
    address = origin.get("url", "")
    if origin.get("dir_info", {}).get("editable"):
        return f"-e '{unquote(address.removeprefix('file://'))}{extras}'"
    if address and "vcs_info" in origin:
        address = f"{origin['vcs_info']['vcs']}+{address}@{origin['vcs_info']['commit_id']}"
    return f"'{NAME}{extras} @ {address}'" if address else f"'{NAME}{extras}'"


def _origin() -> dict[str, Any]:
    """Empty where it came from an index, or was not installed.

    Source: https://packaging.python.org/en/latest/specifications/direct-url/
    """
    from importlib.metadata import PackageNotFoundError, distribution  # 20 ms, which `import autotune` does not need

    try:
        text = distribution(NAME).read_text("direct_url.json")
    except PackageNotFoundError:
        return {}
    origin: dict[str, Any] = json.loads(text or "{}")
    return origin
