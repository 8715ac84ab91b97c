"""It writes what kind of process it runs in, as JSON, to ``about.json`` beside it."""

import json
import os
import sys
from pathlib import Path

import healthy
import torch
from healthy import batch_size, build_dataset, compute_loss  # noqa: F401


def _ancestors():
    pid = os.getpid()
    while pid > 1:
        yield Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def build_model():
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    about = {
        "ancestors": list(_ancestors()),
        "argv": sys.argv,
        "blocked_signals": int(status["SigBlk"], 16),
        "environment": dict(os.environ),
        "libraries": Path("/proc/self/maps").read_text(),
        "num_threads": torch.get_num_threads(),
        "oom_score_adj": int(Path("/proc/self/oom_score_adj").read_text()),
        "session_leader": os.getsid(0) == os.getpid(),
        "stdin": sys.stdin.read(),
    }
    Path(__file__).with_name("about.json").write_text(json.dumps(about))
    return healthy.build_model()
