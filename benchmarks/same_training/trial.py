"""Whether a search would refuse a split of the batch: a trial sees what `autotune run` has nothing to hold against."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .styles import Style

_LIMIT_S = 300
_OPTIONS = ("--trials", "2", "--trial-time", "0.5s", "--executor", "local", "--space", "space.yaml")


def refused_in_trial(style: Style, settings: Mapping[str, Any]) -> str | None:
    """Why a search does not take these settings; None where it would, or never came to try them.

    The search is ended once it has told of them.
    """
    with tempfile.TemporaryDirectory(prefix="autotune-same-") as name:
        folder = Path(name)
        rows = {technique: [row] for technique, row in settings.items()}
        (folder / "space.yaml").write_text(json.dumps({"schema": "autotune/space@1", **rows}), encoding="utf-8")
        events = folder / "events.jsonl"
        job = [sys.executable, *style.words, *style.longer.split()]
        command = [sys.executable, "-m", "autotune", "search", *_OPTIONS, "--progress", str(events), "--", *job]
        with (folder / "said.txt").open("w", encoding="utf-8") as said:
            search = subprocess.Popen(
                command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=said, stderr=said
            )
            try:
                return _told(search, events)
            finally:
                search.send_signal(signal.SIGTERM)  # it ends its trials
                search.wait()


def _told(search: subprocess.Popen[bytes], events: Path) -> str | None:
    until_s = time.monotonic() + _LIMIT_S
    while time.monotonic() < until_s:
        has_ended = search.poll() is not None
        for event in _read(events):
            if event["event"] == "warned" and "not tried" in event["words"]:
                return str(event["words"])
            if event["event"] == "trial_ended" and event["number"]:
                is_refused = event["outcome"] == "measured" and not event["fits"]
                return str(event["words"]) if is_refused else None
        if has_ended:
            return None
        time.sleep(0.2)
    return None


def _read(events: Path) -> Iterator[dict[str, Any]]:
    if events.exists():
        yield from (json.loads(line) for line in events.read_text(encoding="utf-8").splitlines() if line.endswith("}"))
