"""Libraries to preload: found where a user without root can put them."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.techniques import Settings
from autotune.techniques import allocator as allocator_module
from autotune.techniques.allocator import Allocator, find_library, installed_allocators

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux preloads libraries")


def some_library() -> Path:
    """A shared library that this process has mapped."""
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    return next(Path(line[5]) for line in lines if len(line) == 6 and Path(line[5]).name.startswith("libm.so"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a library that stands for tcmalloc, named by LD_LIBRARY_PATH."""
    folder = tmp_path / "lib"
    folder.mkdir()
    shutil.copy(some_library(), folder / "libtcmalloc_minimal.so.4")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere::{folder}")
    return folder


def test_a_library_on_the_loaders_path_is_found_without_a_linker(folder, monkeypatch):
    """``ctypes.util.find_library`` finds it only where ``gcc`` or ``ld`` is installed."""
    monkeypatch.setenv("PATH", "")
    assert find_library("tcmalloc_minimal") == str(folder / "libtcmalloc_minimal.so.4")
    assert "tcmalloc" in installed_allocators()


def test_a_process_maps_it_with_the_loaders_path_gone(folder):
    """The full path is preloaded."""
    environment = Settings(allocator=Allocator(kind="tcmalloc")).environment({})
    assert environment == {"LD_PRELOAD": str(folder / "libtcmalloc_minimal.so.4")}
    without = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    code = "print(open('/proc/self/maps').read())"
    child = subprocess.run([sys.executable, "-c", code], env={**without, **environment}, capture_output=True, text=True)
    assert (child.stderr, str(folder) in child.stdout) == ("", True)


def test_a_library_in_pythons_own_environment_is_found(folder, monkeypatch):
    """Where conda puts it, which is on no path of the loader's."""
    monkeypatch.delenv("LD_LIBRARY_PATH")
    monkeypatch.setattr(sys, "prefix", str(folder.parent))
    assert find_library("tcmalloc_minimal") == str(folder / "libtcmalloc_minimal.so.4")


def test_what_cannot_be_preloaded_is_not_offered(tmp_path, monkeypatch):
    """A linker script; a library for another processor; a folder whose name a list of libraries cannot hold."""
    whole = some_library().read_bytes()
    contents = {"script": b"INPUT(libthere.so.4)", "other": whole[:18] + b"\xff\xff" + whole[20:], "a b": whole}
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "libnowhere.so.1").write_bytes(content)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / name))
        assert find_library("nowhere") is None, name


def test_a_debugging_variant_is_not_taken(folder):
    (folder / "libtcmalloc_minimal.so.4").rename(folder / "libtcmalloc_minimal_debug.so.4")
    assert find_library("tcmalloc_minimal") != str(folder / "libtcmalloc_minimal_debug.so.4")


def test_in_force_is_the_library_that_malloc_is_in(folder, monkeypatch):
    """A library of that name that is mapped without being the allocator is not applied; one of another file name
    (gperftools builds ``libtcmalloc.so.4`` and ``libtcmalloc_minimal.so.4``) is."""
    environment = {**os.environ, **Settings(allocator=Allocator(kind="tcmalloc")).environment({})}
    code = "from autotune.techniques.allocator import Allocator; print(Allocator(kind='tcmalloc').not_in_force())"
    child = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "preloaded, which this process is not" in child.stdout
    monkeypatch.setattr(allocator_module, "_malloc_library", lambda: "libtcmalloc.so.4.5.9")
    assert Allocator(kind="tcmalloc").not_in_force() is None


def test_a_library_that_the_linkers_cache_still_names_is_not_offered(monkeypatch):
    """Its file may have been removed since ``ldconfig`` ran."""
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: f"lib{name}.so.7")
    assert find_library("gone") is None
