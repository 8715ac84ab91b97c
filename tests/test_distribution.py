"""What is installed, under which name: a wheel that holds it all, and the other package that imports as this one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune import distribution
from autotune.distribution import conflict, requirement
from autotune.report.doctor import examine

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "autotune"


def run(*args: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True
    )


def _sources() -> Iterator[Path]:
    for folder in (PACKAGE, PACKAGE / "workers", PACKAGE / "search_spaces"):
        yield from folder.rglob("*.py")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built by setuptools itself from the files that an image is built of."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "checkout"
    copy.mkdir()
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        path = ROOT / line.removeprefix("!")
        if line.startswith("!") and path.is_dir():
            shutil.copytree(path, copy / path.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif line.startswith("!"):
            shutil.copy(path, copy)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    done = run("-c", code, cwd=copy)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.medium
def test_the_wheels_only_top_level_name_is_autotune(wheel):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"autotune"}


def test_the_wheel_holds_every_module_and_data_file(wheel):
    """Both roots with the YAML of the presets, the schemas, and the mark that types are there."""
    files = [
        *(str(path.relative_to(ROOT)) for path in _sources()),
        *(f"autotune/search_spaces/{path.name}" for path in (ROOT / "search_spaces").glob("*.yaml")),
    ]
    files += [*(f"autotune/{path.name}" for path in PACKAGE.glob("*.json")), "autotune/py.typed"]
    files += ["autotune/report/templates/profile.html", "autotune/service/web/static/page.js"]
    assert set(files) - {*zipfile.ZipFile(wheel).namelist()} == set()
    assert "autotune/search_spaces/default.yaml" in files


@pytest.fixture
def installed(wheel, tmp_path) -> Path:
    """The folder that pip installed the wheel into; its dependencies are this environment's."""
    folder = tmp_path / "site"
    done = run(
        "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(folder), str(wheel), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_a_first_search_runs_from_an_empty_folder_with_the_wheel_alone(installed, tmp_path):
    """Its own command, without the checkout: the task that `init` writes is searched, and the plan is shown."""
    home = tmp_path / "home"
    home.mkdir()

    def autotune(*args: str) -> str:
        done = run(str(installed / "bin" / "autotune"), *args, cwd=home, PYTHONPATH=str(installed))
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run("-c", "import autotune.workers as w; print(w.__file__)", cwd=home, PYTHONPATH=str(installed))
    assert where.stdout.strip() == str(installed / "autotune" / "workers" / "__init__.py")
    autotune("init", "model.py")
    autotune("search", "model.py", "--trials", "2", "--trial-time", "0.2s", "--executor", "local")
    assert "fingerprint" in (home / "plan.yaml").read_text()
    assert "samples/s" in autotune("show", "plan.yaml")


def _told(code: list[str], installed: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run(*code, cwd=cwd, PYTHONPATH=str(installed))


@pytest.mark.medium
def test_the_other_package_in_the_same_folder_is_told_at_the_first_import(installed, tmp_path):
    """It was there before: its files are still among ours."""
    assert _told(["-W", "error", "-c", "import autotune"], installed, tmp_path).returncode == 0
    (installed / "autotune" / "tuner.py").write_text("class RandomSearch: ...\n")
    told = _told(["-c", "import autotune; autotune.Plan"], installed, tmp_path)
    assert told.returncode == 0
    assert "pip uninstall autotune autotune-plan" in told.stderr


@pytest.mark.medium
def test_if_the_import_is_the_other_package_the_module_says_so(installed, tmp_path):
    """It does where it is installed after this one."""
    (installed / "autotune" / "tuner.py").write_text("class RandomSearch: ...\n")
    (installed / "autotune" / "__init__.py").write_text("from autotune.tuner import RandomSearch\n")
    told = _told(["-m", "autotune", "doctor"], installed, tmp_path)
    assert told.returncode == 1
    assert told.stderr.startswith("autotune: PyPI's package autotune (another project, of 2018)")
    assert "Traceback" not in told.stderr


def test_the_doctor_says_so_too(tmp_path, monkeypatch):
    assert conflict() is None
    monkeypatch.setattr(distribution, "_FOLDER", tmp_path)
    (tmp_path / "tuner.py").touch()
    assert conflict() in examine()["advice"]


@pytest.mark.parametrize(
    ("origin", "extra", "wanted"),
    [
        ({}, None, "'autotune-plan'"),
        ({}, "service", "'autotune-plan[service]'"),
        ({"url": "file:///my%20src", "dir_info": {"editable": True}}, "service", "-e '/my src[service]'"),
        ({"url": "file:///src/it.whl", "archive_info": {}}, None, "'autotune-plan @ file:///src/it.whl'"),
        (
            {"url": "https://host/it.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "service",
            "'autotune-plan[service] @ git+https://host/it.git@abc'",
        ),
    ],
)
def test_what_is_told_to_install_comes_from_where_this_came_from(origin, extra, wanted, monkeypatch):
    class Installed:
        def read_text(self, name: str) -> str | None:
            return json.dumps(origin) if origin and name == "direct_url.json" else None

    monkeypatch.setattr("importlib.metadata.distribution", {"autotune-plan": Installed()}.__getitem__)
    assert requirement(extra) == wanted
