"""Records a long training, and ends it: as `recorded_in_full`, at a cost that leaves a job's speed as it is.

Of each batch one running hash for each tensor in it, whatever batches the samples come in; of each optimizer step its
losses, its learning rates and when it ended; no gradients. After ``$SAME_TRAINING_STEPS`` steps the record is written
and the process ends. What a script leaves to the system's random numbers is seeded.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recorded_in_full import PLACE, Recorder, tensors_in

_NUM_LOOKS = 4
"""How often a training's loader workers are asked for their memory."""


class BriefRecorder(Recorder):
    """What this process trains, until it has taken so many steps."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self._num_steps, self._workers_bytes = num_steps, 0

    def install(self, torch: Any) -> None:
        """Put the hooks on torch, and seed it."""
        import numpy as np

        super().install(torch)
        torch.manual_seed(0)
        np.random.seed(0)

    def _next(self, original: Any, iterator: Any) -> Any:
        batch = original(iterator)
        record = iterator._recorded
        with self._torch._C.DisableTorchFunction(), self._torch.no_grad():
            tensors = [tensor.detach().cpu().contiguous() for tensor in tensors_in(batch, self._torch)]
            hashes = record.setdefault("hashes", [hashlib.sha1() for _ in tensors])
            for running, tensor in zip(hashes, tensors, strict=True):
                running.update(tensor.reshape(-1).view(self._torch.uint8).numpy())
        num_before = record["batches"][-1][0] if record["batches"] else 0
        num_own = max((len(tensor) for tensor in tensors if tensor.dim()), default=1)
        record["batches"].append((num_before + num_own, "".join(running.hexdigest()[:12] for running in hashes)))
        return batch

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Gradients are not looked at: their norm would slow each step."""

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        step = self._step(optimizer)
        self.steps.append(step | {"ended_s": time.perf_counter(), "cpu_s": time.process_time()})
        self._losses = []
        if len(self.steps) * _NUM_LOOKS % self._num_steps < _NUM_LOOKS:
            self._workers_bytes = max(self._workers_bytes, sum(map(_private_bytes, _descendants(os.getpid()))))
        if len(self.steps) == self._num_steps:
            self._write()
            for pid in list(_descendants(os.getpid())):
                os.kill(pid, signal.SIGKILL)
            os._exit(0)

    def _write(self) -> None:
        """A process that ends before has too few steps, which is seen."""
        if os.getpid() != self._process or not self.steps:
            return
        epochs = [
            {
                "loader": one["loader"],
                "indices": _flat(one["indices"][: len(one["batches"])]),
                "batches": one["batches"],
            }
            for one in self.epochs
        ]
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        peak_bytes = int(status.partition("VmHWM:")[2].split()[0]) * 1024 + self._workers_bytes
        record = {"epochs": epochs, "steps": self.steps, "peak_bytes": peak_bytes}
        Path(str(PLACE), f"{self._process}.json").write_text(json.dumps(record), encoding="utf-8")


def _flat(indices: list[Any]) -> list[Any]:
    return [index for batch in indices for index in (batch if isinstance(batch, (list, tuple)) else [batch])]


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text(encoding="utf-8").split():
            yield int(child)
            yield from _descendants(int(child))


def _private_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private"))
