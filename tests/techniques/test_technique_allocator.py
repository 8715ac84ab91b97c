"""``allocator``: its contract, the environment, and child processes that start with it."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from line_task import floats, line, training_of

import autotune
from autotune.errors import PlanError
from autotune.techniques import Settings
from autotune.techniques import allocator as module
from autotune.techniques.allocator import Allocator, installed_allocators
from autotune.testing.facts import BARE
from autotune.testing.techniques import TechniqueContract
from autotune.units import MIB

KINDS = ("tcmalloc", "jemalloc")
needs = {
    kind: pytest.mark.skipif(kind not in installed_allocators(), reason=f"{kind} is not installed") for kind in KINDS
}
each_installed = pytest.mark.parametrize("kind", [pytest.param(kind, marks=needs[kind]) for kind in KINDS])


on_glibc = pytest.mark.skipif("mmap" not in installed_allocators(), reason="malloc is not glibc's")


@pytest.mark.usefixtures("_threshold")
class TestAllocator(TechniqueContract):
    technique = Allocator
    bitwise = True
    lacking = (*(Allocator(kind=kind) for kind in (*KINDS, "mmap")), Allocator(kind="expandable_segments"))

    @pytest.fixture
    def _threshold(self) -> Iterator[None]:
        """Later tests have glibc's own again, as it is once it has grown."""
        with module.heap_kept_small():
            yield


def libraries_of_child(environment: dict[str, str]) -> str:
    """The shared libraries that a new interpreter, which knows nothing of this package, has mapped."""
    code = "print(open('/proc/self/maps').read())"
    child = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    assert child.stderr == ""
    return child.stdout


@each_installed
def test_a_process_started_with_the_environment_has_the_library(kind):
    """It is mapped in the child, and is not without the environment."""
    environment = Settings(allocator=Allocator(kind=kind)).environment({})
    assert f"lib{kind}" in libraries_of_child(environment)
    assert f"lib{kind}" not in libraries_of_child({"LD_PRELOAD": ""})


def test_what_is_preloaded_already_stays(monkeypatch):
    """The library stands before the user's own; and once, where it is the user's own."""
    monkeypatch.setattr(module, "_find", lambda kind: "libtcmalloc.so.4")
    settings = Settings(allocator=Allocator(kind="tcmalloc"))
    first = settings.environment({"LD_PRELOAD": "libm.so.6"})
    assert first == {"LD_PRELOAD": "libtcmalloc.so.4:libm.so.6"}
    assert settings.environment(first) == first


@needs["tcmalloc"]
def test_apply_warns_when_the_library_is_not_in_force():
    """And says how to start the job; the default does not."""
    with pytest.warns(UserWarning, match=r"tcmalloc preloaded, which this process is not.*`autotune run plan\.yaml"):
        training_of(line(floats(2)), allocator=Allocator(kind="tcmalloc"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*preloaded")
        training_of(line(floats(2)))


@pytest.mark.medium
@each_installed
def test_a_process_that_has_the_library_is_not_warned(kind):
    code = f"from autotune.techniques.allocator import Allocator; print(Allocator(kind={kind!r}).not_in_force())"
    environment = {**os.environ, **Allocator(kind=kind).environment()}
    child = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert child.stdout == "None\n"


DEBIANS = Path(f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")
"""An interpreter that is not position-independent: its ``malloc`` is a jump of its own to the library's."""


@pytest.mark.medium
@needs["tcmalloc"]
@pytest.mark.skipif(not DEBIANS.exists(), reason="Debian's Python of this version is not installed")
def test_a_process_of_debians_python_that_has_the_library_is_not_warned():
    code = "from autotune.techniques.allocator import Allocator; print(Allocator(kind='tcmalloc').not_in_force())"
    packages = os.pathsep.join(filter(None, [*sys.path, str(Path(module.__file__).parents[2])]))
    for preloaded, said in ((Allocator(kind="tcmalloc").environment(), "None"), ({}, "the plan was measured with")):
        environment = {**os.environ, "PYTHONPATH": packages, **preloaded}
        child = subprocess.run([DEBIANS, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert child.stdout.startswith(said)


def test_what_is_not_installed_says_how_to_get_it(monkeypatch):
    """In the space, by its reason; in a plan, by an error: with root, and without."""
    monkeypatch.setattr(module, "_find", lambda kind: None)
    assert not {*KINDS} & {*installed_allocators()}
    assert Allocator(kind="jemalloc").unavailable(BARE) == (
        "jemalloc is not installed: apt-get install libjemalloc2, or without root conda install -c conda-forge jemalloc"
    )
    with pytest.raises(PlanError, match=r"libtcmalloc-minimal4, or .*gperftools\), or use kind: system"):
        Allocator(kind="tcmalloc").environment()


def test_expandable_segments_join_the_users_configuration(monkeypatch):
    """The user's other options stay, under the variable's older name too."""
    segments = Allocator(kind="expandable_segments")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert segments.environment() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert "is not set" in str(segments.not_in_force())
    joined = "expandable_segments:True,max_split_size_mb:64"
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        own = {name: "max_split_size_mb:64"}
        assert Settings(allocator=segments).environment(own) == {"PYTORCH_ALLOC_CONF": joined}
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", joined)
    assert segments.not_in_force() is None


def test_each_device_has_its_own():
    """A C allocator for CPU training, expandable segments for CUDA's."""
    has_all = {"allocators": KINDS}
    cuda = BARE.device.model_copy(update={"type": "cuda"})
    offered = {
        "cpu": Allocator.choices(BARE.model_copy(update=has_all)),
        "cuda": Allocator.choices(BARE.model_copy(update={**has_all, "device": cuda})),
    }
    assert [choice.kind for choice in offered["cpu"]] == ["system", "tcmalloc", "jemalloc"]
    assert [choice.kind for choice in offered["cuda"]] == ["system", "expandable_segments"]


def test_mmap_is_offered_where_tcmalloc_is_not_installed():
    offered = [
        [one.kind for one in Allocator.choices(BARE.model_copy(update={"allocators": found}))]
        for found in (("mmap",), ("jemalloc", "mmap"), ("tcmalloc", "mmap"))
    ]
    assert offered == [["system", "mmap"], ["system", "jemalloc", "mmap"], ["system", "tcmalloc"]]


_LEFT = """
import sys, torch, autotune
from autotune.measure.processes import resident_bytes
from autotune.techniques import Settings
from autotune.techniques.allocator import heap_kept_small
for kind in sys.argv[1].split():
    kind, _, from_mib = kind.partition(":")
    if kind == "fit":
        with heap_kept_small():
            pass
    else:
        said = {"kind": kind} | ({"from_mib": int(from_mib)} if from_mib else {})
        plan = autotune.Plan(settings=Settings.model_validate({"allocator": said}))
        autotune.apply_to_model(plan, torch.nn.Linear(1, 1))
one = torch.ones(16 << 20, dtype=torch.uint8)
del one  # glibc's own threshold has grown to 16 MiB
before, kept = resident_bytes(), []
large = []
for _ in range(40):
    large.append(torch.ones(3 << 20, dtype=torch.uint8))
    kept.append(torch.ones(50_000))
del large
print((resident_bytes() - before) >> 20)
"""


def left_mib(kinds: str, **environment: str) -> int:
    """Of forty tensors of 3 MiB that are freed, and as many of 0.2 MiB that are not, after plans of these kinds."""
    child = subprocess.run(
        [sys.executable, "-c", _LEFT, kinds], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return int(child.stdout)


@on_glibc
@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["mmap", "system mmap", "mmap fit", "mmap:16 mmap:2", "mmap:2 fit"])
def test_with_mmap_what_is_freed_goes_back(kinds):
    assert left_mib(kinds) <= 12


@on_glibc
@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["system", "mmap system", "fit", "mmap:4"])
def test_without_it_glibcs_heap_keeps_what_is_freed(kinds):
    """Much of 120 MiB; also where an earlier plan had it, or fit has looked, or tensors are below its size."""
    assert left_mib(kinds) >= 30


@on_glibc
@pytest.mark.slow
def test_a_threshold_of_the_users_own_stays():
    assert left_mib("fit", MALLOC_MMAP_THRESHOLD_="1048576") <= 12


@pytest.mark.parametrize(
    ("library", "is_glibc"), [("libc.so.6", True), ("libc-2.31.so", True), ("libmimalloc.so.2", False), ("", True)]
)
def test_whose_malloc_is_glibcs(monkeypatch, library, is_glibc):
    """Of an interpreter that is not position-independent it is in no library."""
    monkeypatch.setattr(module, "_malloc_library", lambda: library)
    assert module._is_glibc() == (is_glibc and sys.platform.startswith("linux"))


def test_a_size_from_which_on_glibc_maps_is_mmaps_alone_and_what_glibc_takes():
    """1 to 32 MiB: glibc refuses more. A plan without it maps from 1 MiB on, as it says nothing."""
    assert Allocator(kind="mmap", from_mib=4).maps_from == 4 * MIB
    assert Allocator(kind="mmap").maps_from == MIB
    assert Allocator(kind="mmap", from_mib=1).model_dump(exclude_defaults=True) == {"kind": "mmap"}
    assert Allocator(kind="mmap", from_mib=4).describe() == "mmap (from 4 MiB)"
    with pytest.raises(ValueError, match=r"from_mib: kind tcmalloc maps by itself, but got 4\. Use kind: mmap"):
        Allocator(kind="tcmalloc", from_mib=4)
    for wrong in (0, 33):
        with pytest.raises(ValueError, match="from_mib"):
            Allocator(kind="mmap", from_mib=wrong)


def test_mmap_needs_glibc(monkeypatch):
    monkeypatch.setattr(module, "_is_glibc", lambda: False)
    assert installed_allocators() == tuple(kind for kind in KINDS if module._find(kind))
    with pytest.raises(PlanError, match=r"settings\.allocator\.kind: mmap: .* Use kind: system"):
        Allocator(kind="mmap").on_model(torch.nn.Identity(), ())


def test_a_plan_needs_no_environment_by_itself():
    assert autotune.Plan(settings=Settings()).settings.environment({"LD_PRELOAD": "libm.so.6"}) == {}
