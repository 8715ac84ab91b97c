"""Raw rows of a benchmark, kept with what they were measured on and by which command."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from autotune import __version__
from autotune.measure.device import inspect_device
from autotune.techniques.support.facts import num_processors

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"


def environment(device: Literal["cpu", "cuda"]) -> dict[str, Any]:
    """What a row is worth nothing without: device, versions, date, command."""
    import torch

    script = Path(sys.argv[0]).resolve()
    inside = script.relative_to(HERE) if script.is_relative_to(HERE) else Path(script.name)
    module = ".".join(part for part in inside.with_suffix("").parts if part != "__main__")
    return {
        "device": inspect_device(device).name,
        "processors": num_processors(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "autotune": __version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", "-m", f"benchmarks.{module}", *sys.argv[1:]]),
    }


def save_rows(name: str, device: Literal["cpu", "cuda"], rows: Iterable[dict[str, Any]]) -> Path:
    """Add to ``results/<name>-<device>.jsonl``, each row with its environment; what is there stays."""
    path = _path(name, device)
    path.parent.mkdir(exist_ok=True)
    where = environment(device)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({**row, **where}) + "\n" for row in rows)
    return path


def load_rows(name: str, device: Literal["cpu", "cuda"]) -> list[dict[str, Any]]:
    """All rows of ``results/<name>-<device>.jsonl``, the oldest first."""
    return [json.loads(line) for line in _path(name, device).read_text(encoding="utf-8").splitlines()]


def _path(name: str, device: str) -> Path:
    return HERE / "results" / f"{name}-{device}.jsonl"
