"""Systems other than Linux with a GPU of its own: what is refused there, and what a search there is told."""

from __future__ import annotations

import subprocess
import sys

import pytest

from autotune.service import driver


def test_windows_is_refused_in_words(tmp_path):
    """And not for a module that it has not."""
    program = (
        "import sys; sys.platform = 'win32'; sys.modules['fcntl'] = sys.modules['resource'] = None; import autotune"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    said = ended.stderr.splitlines()[-1]
    assert said.startswith("ImportError: autotune runs on Linux, and on macOS, but not on Windows itself")
    assert "Use it in WSL 2" in said


@pytest.mark.parametrize(
    "name",
    [
        "PYTORCH_ALLOC_CONF",
        "CUBLAS_WORKSPACE_CONFIG",
        "NCCL_P2P_DISABLE",
        "TRITON_CACHE_DIR",
        "LD_PRELOAD",
        "MALLOC_CONF",
    ],
)
def test_a_services_trials_run_under_the_allocator_of_its_machine(name):
    """As jobs there do; what is the service's own stays with it."""
    own = {name: "as here", "AUTOTUNE_TOKEN": "secret", "AUTOTUNE_DATABASE": "postgresql://a:b@c"}
    kept = driver._environment(own, "search", 1)
    assert kept[name] == "as here"
    assert not {"AUTOTUNE_TOKEN", "AUTOTUNE_DATABASE"} & kept.keys()
