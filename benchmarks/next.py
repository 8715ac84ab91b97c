"""Runs the suite against the newest releases that the index has, and says what broke.

    python -m benchmarks.next                        # the whole suite: as long as `make test` and `make test-slow`
    python -m benchmarks.next -- tests/layers -q     # what pytest is to run
    python -m benchmarks.next --no-tests             # the private parts alone

A fresh virtual environment is made in a temporary folder, and what pyproject.toml names is installed there without
constraints.txt. Three things are said: which versions those are; which private parts of ``autotune.internals`` they
lack, and what happens without each; and which tests fail, by what they raised. Ends with 1 if anything did. Where the
libraries cannot be installed together, that is said, and what of them could be is tested.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("torch", "transformers", "accelerate", "lightning", "ray", "optuna", "pydantic")
"""Those that are asked for by themselves where all together cannot be had."""
_SUITE = ("-m", "not alone", "-n", "2", "--dist", "worksteal")
_MOST = 20
"""Lines of what an install said that are shown."""


def main() -> None:
    """Install, look and test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-tests", action="store_true", help="look at the private parts alone")
    parser.add_argument("--python", default=sys.executable, help="of a virtual environment that is there already")
    parser.add_argument("--installed", action="store_true", help="install nothing: --python has what is to be tested")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="autotune-next-") as folder:
        python = arguments.python if arguments.installed else _environment(Path(folder))
        broken = [] if arguments.installed else [*_install(python)]
        print("\n".join(["", "Versions:", *_versions(python)]), flush=True)
        broken += _parts(python)
        if not arguments.no_tests:
            broken += _tests(python, arguments.pytest or _SUITE, Path(folder, "suite.xml"))
    print("\n".join(["", "What broke:", *broken] if broken else ["", "Nothing broke."]))
    sys.exit(1 if broken else 0)


def _environment(folder: Path) -> str:
    venv.create(folder / "venv", with_pip=True)
    return str(folder / "venv" / "bin" / "python")


def _install(python: str) -> list[str]:
    """Everything at its newest; one by one where that fails, and which did."""
    pip = (python, "-m", "pip", "install", "-q", "--upgrade", "--upgrade-strategy", "eager")
    if (reason := _failure(*pip, "-e", f"{ROOT}[test]")) is None:
        return []
    broken = [f"install: pyproject.toml's requirements cannot be had together:\n{reason}"]
    for name in (*LIBRARIES, "pytest", "pytest-xdist"):
        if (reason := _failure(*pip, name)) is not None:
            broken.append(f"install: {name}:\n{reason}")
    if (reason := _failure(python, "-m", "pip", "install", "-q", "-e", f"{ROOT}[test]")) is not None:
        broken.append(f"install: autotune beside these:\n{reason}")
    return broken


def _failure(*command: str) -> str | None:
    """The last of what a command said; None where it ended well."""
    done = subprocess.run(command, capture_output=True, text=True)
    said = (done.stderr or done.stdout).strip().splitlines()[-_MOST:]
    return None if done.returncode == 0 else "\n".join(f"  {line}" for line in said)


def _versions(python: str) -> list[str]:
    """Of each library, what is installed and what was tried."""
    code = (
        "import json, sys, importlib.metadata as m\n"
        "found = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "print(json.dumps({name: found.get(name) for name in sys.argv[1:]}))"
    )
    done = subprocess.run([python, "-c", code, *LIBRARIES], capture_output=True, text=True, check=True)
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    found = json.loads(done.stdout)
    return [f"  {name} {found[name] or 'not installed'} (tested with {pinned[name]})" for name in LIBRARIES]


def _parts(python: str) -> list[str]:
    """Private parts that are missing, and what happens without each."""
    done = _run(python, "-m", "autotune.internals")
    if done.returncode == 0:
        return []
    *rows, _ = done.stdout.splitlines() or [""]
    said = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
    return [f"private part: {row}" for row in rows] or [f"private parts: they could not be looked at: {said}"]


def _tests(python: str, arguments: Sequence[str], report: Path) -> list[str]:
    """Tests that fail, by what they raised."""
    done = _run(python, "-m", "pytest", "-q", *arguments, f"--junitxml={report}")
    if not report.exists():
        said = (done.stdout + done.stderr).splitlines()[-_MOST:]
        return ["\n".join(["tests: pytest did not run:", *(f"  {line}" for line in said)])]
    failed: dict[str, list[str]] = defaultdict(list)
    cases = [*ElementTree.parse(report).iter("testcase")]
    for case in cases:
        for fault in (*case.iter("failure"), *case.iter("error")):
            said = (fault.get("message") or "?").strip().splitlines()[0]
            failed[said[:160]].append(f"{case.get('classname')}.{case.get('name')}")
    print(f"\n{len(cases)} tests, of which {sum(map(len, failed.values()))} fail", flush=True)
    rows = sorted(failed.items(), key=lambda row: -len(row[1]))
    return [f"tests: {said}\n" + "\n".join(f"  {name}" for name in names) for said, names in rows]


def _run(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([python, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


if __name__ == "__main__":
    main()
