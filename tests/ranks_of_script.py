"""Runs scripts in two processes each, under the launcher as torchrun would start it; torch is imported once for all."""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
from pathlib import Path

from autotune.script.launch import launch

PRELOADED = ("torch._dynamo", "torch.nn.parallel", "autotune.script.plan.hooks", "autotune.training.apply_pieces")
"""What each process would import otherwise."""


def in_rank(rank: int, port: int, out: Path, plan: str | None, words: list[str]) -> None:
    with out.open("wb", buffering=0) as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"})
    if plan is not None:
        os.environ["AUTOTUNE_PLAN"] = plan
    launch(["--add-path", *words])


def run(name: str, plan: str | None, words: list[str]) -> list[int]:
    """Exit codes; what each printed is in a file of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pids = []
    for rank in range(2):
        pids.append(os.fork())
        if pids[-1] == 0:
            code = 1
            try:
                in_rank(rank, port, Path(f"{name}-{rank}.out"), plan, words)
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


if __name__ == "__main__":
    for module in PRELOADED:
        importlib.import_module(module)
    jobs = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps({name: run(name, plan, words) for name, (plan, words) in jobs.items()}))
