"""A job that says what kind of process it runs in: as a task, to a file beside it; run by itself, to stdout.

It uses nothing of this package.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

batch_size = 8
_STATUS = ("SigBlk", "SigIgn", "NoNewPrivs", "Seccomp", "CapEff", "Cpus_allowed_list", "Mems_allowed_list")
_PR_GET_TIMERSLACK, _PR_GET_THP_DISABLE = 30, 42  # linux/prctl.h
_IOPRIO_GET = 252  # of x86-64


def about() -> dict[str, Any]:
    """What the kernel, Python and torch say of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    prctl = ctypes.CDLL(None).prctl
    facts = {
        "nice": os.nice(0),
        "scheduling policy": os.sched_getscheduler(0),
        "scheduling priority": os.sched_getparam(0).sched_priority,
        "CPU affinity": sorted(os.sched_getaffinity(0)),
        "torch threads": torch.get_num_threads(),
        "torch interop threads": torch.get_num_interop_threads(),
        "timer slack": prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0),
        "huge pages disabled": prctl(_PR_GET_THP_DISABLE, 0, 0, 0, 0),
        "personality": _read("personality"),
        "cgroup": _read("cgroup"),
        "oom_score_adj": int(_read("oom_score_adj")),
        "umask": status["Umask"].strip(),
        **{name: status[name].strip() for name in _STATUS if name in status},
        "stdin": os.readlink("/proc/self/fd/0"),
        "session leader": os.getsid(0) == os.getpid(),
        "terminal": _has_terminal(),
        "folder": os.getcwd(),
        "argv": [Path(name).name for name in sys.argv],
        "executable": sys.executable,
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "safe path": bool(getattr(sys.flags, "safe_path", False)),
        "gc": (gc.isenabled(), gc.get_threshold()),
        "objects left to gc": gc.get_freeze_count() == 0,
        "warnings are errors": any(action == "error" for action, *_ in warnings.filters),
        "standard output": (sys.stdout.encoding, sys.stdout.errors),
    }
    if os.uname().machine == "x86_64":
        facts["I/O priority"] = ctypes.CDLL(None).syscall(_IOPRIO_GET, 1, 0)
    for name in sorted(dir(resource)):
        if name.startswith("RLIMIT_"):
            facts[name] = resource.getrlimit(getattr(resource, name))
    facts |= {f"${name}": value for name, value in os.environ.items()}
    return facts


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        return False
    return True


def _read(name: str) -> str:
    try:
        return (Path("/proc/self") / name).read_text().strip()
    except OSError:
        return ""


def build_model() -> nn.Module:
    """A small one; first it says what there is to say."""
    Path(__file__).with_name("about.json").write_text(json.dumps(about()))
    return nn.Linear(8, 8)


def build_dataset() -> list[torch.Tensor]:
    """A few samples."""
    return [torch.randn(8) for _ in range(64)]


def compute_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Something to be made smaller."""
    return model(batch).square().mean()


if __name__ == "__main__":
    print(json.dumps(about()))
