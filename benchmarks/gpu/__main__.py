"""Twenty checks of what this package claims of CUDA, on the card that is here; see the package."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from autotune import __version__

from . import exact, memory, several, speed, surroundings, whole
from .check import Check, Skipped
from .place import Place, begin_forks

CHECKS: tuple[Check, ...] = (
    *surroundings.CHECKS,
    *memory.CHECKS,
    *speed.CHECKS,
    *exact.CHECKS,
    *whole.CHECKS,
    *several.CHECKS,
)


def main() -> int:
    """Run what has no row yet, write the report after each, print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", type=int, action="append", choices=range(len(CHECKS)), help="default: all")
    parser.add_argument("--minutes", type=float, help="begin no check after so many; run again to go on")
    parser.add_argument("--report", type=Path, default=Path("gpu-report.json"))
    parser.add_argument("--again", action="store_true", help="forget the report's rows")
    parser.add_argument("--quick", action="store_true", help="short times: whether the checks run, not what they find")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device that this torch can use: autotune doctor says why", file=sys.stderr)
        return 2
    about = {"torch": torch.__version__, "autotune": __version__, "quick": arguments.quick}
    report = {} if arguments.again else _read(arguments.report, about)
    rows: dict[str, Any] = report.setdefault("checks", {})
    report |= about | {"date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")}
    began_s = time.monotonic()
    begin_forks()
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder), arguments.quick)
        try:
            for number in arguments.check or range(len(CHECKS)):
                if arguments.minutes and time.monotonic() - began_s > 60 * arguments.minutes:
                    break
                if arguments.check or str(number) not in rows:
                    rows[str(number)] = _row(CHECKS[number], place)
                    arguments.report.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
                    print(_line(number, rows[str(number)]), flush=True)
        finally:
            place.close()
    return _end(rows, arguments.report)


def _read(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The report of an earlier run, where it was made by the same torch and this package."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if all(found.get(name) == value for name, value in about.items()) else {}


def _row(check: Check, place: Place) -> dict[str, Any]:
    began_s = time.monotonic()
    row: dict[str, Any] = {"check": check.name, "claim": " ".join((check.run.__doc__ or "").split()), "bar": check.bar}
    try:
        found = check.run(place)
        row |= {"measured": found.measured, "verdict": "within" if found.is_within else "OVER"}
        row["figures"] = found.figures
    except Skipped as reason:
        row |= {"measured": str(reason), "verdict": "skipped"}
    except Exception as error:  # noqa: BLE001 - the next check runs all the same
        row |= {"measured": _anonymous(f"{type(error).__name__}: {error}"), "verdict": "FAILED"}
    return row | {"seconds": round(time.monotonic() - began_s, 1)}


def _anonymous(text: str) -> str:
    """Without this machine's folders."""
    for folder in (str(Path(__file__).resolve().parents[2]), str(Path.home()), tempfile.gettempdir()):
        text = text.replace(folder, "…")
    return text[:500]


def _line(number: int, row: dict[str, Any]) -> str:
    return f"{number:2} {row['check']}: {row['measured']} [{row['bar']}] {row['verdict']}, {row['seconds']} s"


def _end(rows: dict[str, Any], path: Path) -> int:
    verdicts = [row["verdict"] for row in rows.values()]
    told = ", ".join(f"{verdicts.count(word)} {word}" for word in ("within", "skipped", "OVER", "FAILED"))
    left = len(CHECKS) - len(rows)
    print(f"{told}{f', {left} not run yet: run this again' if left else ''}; {path} has them")
    return int(any(word in ("OVER", "FAILED") for word in verdicts))


if __name__ == "__main__":
    sys.exit(main())
