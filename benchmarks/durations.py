"""How long tests take, from what `pytest --junitxml=FILE` wrote: by file, the slowest, and those whose mark is wrong.

    OMP_NUM_THREADS=1 pytest -q -m "not alone" -n 2 --dist worksteal --junitxml=suite.xml
    python -m benchmarks.durations suite.xml [--keep]

A test above 5 s has the mark `slow`, one above 1 s `medium`: `make check` runs neither, `make test` leaves out the slow
ones, `make test-slow` runs those. With --keep the seconds of each file are added to benchmarks/results.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from .rows import HERE, save_rows

SLOW_S, MEDIUM_S = 5.0, 1.0
_MOST = 30
"""Rows that are printed."""
_PLACES = (HERE.parent / "tests", HERE.parent / "autotune" / "testing")


def main() -> None:
    """Print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--keep", action="store_true", help="add a row for each file to benchmarks/results")
    arguments = parser.parse_args()
    tests = [
        (float(case.get("time", 0)), case.get("classname", ""), case.get("name", "").partition("[")[0])
        for case in ElementTree.parse(arguments.file).iter("testcase")
    ]
    by_file: Counter[str] = Counter()
    longest: dict[str, float] = {}
    for seconds, place, name in tests:
        by_file[place] += seconds  # type: ignore[assignment] - a Counter of seconds
        longest[name] = max(seconds, longest.get(name, 0.0))
    print(f"{len(tests)} tests, {sum(by_file.values()):.0f} s of one processor")
    for place, seconds in by_file.most_common(_MOST):
        print(f"{seconds:8.1f} s  {place}")
    marked = _marked()
    for name, seconds in sorted(longest.items(), key=lambda row: -row[1]):
        wanted = "slow" if seconds > SLOW_S else "medium" if seconds > MEDIUM_S else None
        if wanted is not None and marked.get(name) not in (wanted, "slow", "alone"):
            print(f"{seconds:8.1f} s  {name}: mark it {wanted}")
    if arguments.keep:
        rows = ({"file": place, "seconds": round(seconds, 1)} for place, seconds in by_file.most_common())
        save_rows("durations", "cpu", rows)


def _marked() -> dict[str, str]:
    """The mark of each test function that has one."""
    found: dict[str, str] = {}
    for path in (path for place in _PLACES for path in place.rglob("*.py")):
        tree = ast.parse(path.read_text())
        whole = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)]
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            said = [ast.unparse(one) for one in node.decorator_list] + [one for one in whole if "pytestmark" in one]
            for mark in ("slow", "medium", "alone"):
                if any(f"mark.{mark}" in one for one in said):
                    found.setdefault(node.name, mark)
    return found


if __name__ == "__main__":
    main()
