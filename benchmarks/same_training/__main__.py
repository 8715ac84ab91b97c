"""Whether scripts train the same with a plan as without: scripts of many styles, plans of one technique each.

    python -m benchmarks.same_training [--only STYLE]... [--technique NAME]... [--lanes 2] [--keep] [--resume]

Each script (``scripts/``) runs three epochs as it stands and by `autotune run plan.yaml -- python script.py` for each
plan, in processes of their own; a recorder on torch's own objects (``recorder/``) sees each sample in order, each
backward pass with its loss, each optimizer step with its learning rates and its gradient. A pair agrees within what the
technique may change, or was refused in words by the time of its first steps (exit code 2), or by a trial of a search;
anything else failed.
Exits with 1 where one failed. All takes about half an hour on two processors; one style a minute.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..rows import HERE, load_rows, save_rows
from .plans import NAMES, Pair, pairs_of
from .run import attempt, train
from .styles import STYLES, Style
from .task import task_of

NAME = "same-training"
_KINDS = ("agrees", "refused", "FAILED")


def main() -> None:
    """Try the pairs that are asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[style.name for style in STYLES], help="default: all")
    parser.add_argument("--technique", action="append", choices=NAMES, help="default: all")
    parser.add_argument("--lanes", type=int, default=2, help="styles at once")
    parser.add_argument(
        "--keep", action="store_true", help="add a row for each style to benchmarks/results, as they end"
    )
    parser.add_argument("--resume", action="store_true", help="leave out what rows of this commit have")
    arguments = parser.parse_args()
    began_s, commit = time.monotonic(), _commit()
    known = _known(commit) if arguments.resume else {}
    with tempfile.TemporaryDirectory(prefix="autotune-same-") as cache, ThreadPoolExecutor(arguments.lanes) as lanes:
        asked = [
            (style, [pair for pair in pairs_of(style) if _is_asked(pair, arguments.technique, known)])
            for style in STYLES
            if not arguments.only or style.name in arguments.only
        ]
        tried = lanes.map(lambda one: _try(*one, Path(cache), commit if arguments.keep else None), asked)
        found = {
            style.name: {**known.get(style.name, {}), **told} for (style, _), told in zip(asked, tried, strict=True)
        }
    _print(found)
    print(f"{time.monotonic() - began_s:.0f} s of wall clock, at {commit}")
    sys.exit(any(_kind(told) == "FAILED" for tried in found.values() for told in tried.values()))


def _is_asked(pair: Pair, techniques: Sequence[str] | None, known: dict[str, dict[str, str]]) -> bool:
    is_known = pair.technique in known.get(pair.style.name, {})
    return not is_known and (not techniques or pair.technique in techniques)


def _try(style: Style, pairs: Sequence[Pair], cache: Path, commit: str | None) -> dict[str, str]:
    """By technique; with a commit, they are kept."""
    tried = dict(_outcomes(style, pairs, cache)) if pairs else {}
    if commit is not None and tried:
        save_rows(NAME, "cpu", [{"style": style.name, "commit": commit, "pairs": tried}])
    return tried


def _outcomes(style: Style, pairs: Sequence[Pair], cache: Path) -> Iterator[tuple[str, str]]:
    plain = train(style, None, cache)
    if plain.returncode or not plain.record["steps"]:
        raise RuntimeError(f"{style.name} ended with {plain.returncode} by itself: {plain.said[-2000:]}")
    task = task_of(style) if style.has_task else None
    for pair in pairs:
        told = attempt(pair, plain, task, cache)
        print(f"{style.name}, {pair.technique}: {told}", file=sys.stderr, flush=True)
        yield pair.technique, told


def _kind(told: str) -> str:
    return told.partition(":")[0]


def _known(commit: str) -> dict[str, dict[str, str]]:
    known: dict[str, dict[str, str]] = {}
    if (HERE / "results" / f"{NAME}-cpu.jsonl").exists():
        for row in load_rows(NAME, "cpu"):
            if row["commit"] == commit:
                known.setdefault(row["style"], {}).update(row["pairs"])
    return known


def _print(found: dict[str, dict[str, str]]) -> None:
    print(f"{'style':28}" + "".join(f"{kind:>9}" for kind in _KINDS))
    total = dict.fromkeys(_KINDS, 0)
    for name, tried in found.items():
        counts = {kind: sum(_kind(told) == kind for told in tried.values()) for kind in _KINDS}
        total = {kind: total[kind] + counts[kind] for kind in _KINDS}
        print(f"{name:28}" + "".join(f"{counts[kind]:>9}" for kind in _KINDS))
    print(f"{f'{len(found)} styles':28}" + "".join(f"{total[kind]:>9}" for kind in _KINDS))
    for kind in _KINDS[1:]:
        for name, tried in found.items():
            for technique, told in tried.items():
                if _kind(told) == kind:
                    print(f"{name}, {technique}: {told}")


def _commit() -> str:
    """Of the code that is tried."""
    command = ["git", "log", "-1", "--format=%h", "--", "autotune", "workers"]
    return subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
