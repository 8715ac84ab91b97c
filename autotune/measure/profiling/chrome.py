"""A Chrome trace of two optimizer steps by torch's profiler, with the modules as ranges."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.profiler import ProfilerActivity, record_function

from .allocations import Phase
from .module_tracker import Whereabouts
from .watch import Watch, WatchedSteps, nodes_of

_NUM_STEPS = 2


def write_trace(steps: WatchedSteps, path: Path) -> None:
    """Run three more steps and write the last two, with memory events, for chrome://tracing, Perfetto or HTA.

    Args:
        steps: of a training that is warm.
        path: of the JSON file; what is there is replaced.

    Source: https://docs.pytorch.org/docs/stable/profiler.html
    """
    is_cuda = steps.training.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=_NUM_STEPS, repeat=1)  # its steps are what HTA reads
    with torch.profiler.profile(
        activities=activities,
        schedule=schedule,
        profile_memory=True,
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(1 + _NUM_STEPS):
            steps.step(_Ranges(steps.training.model))
            profiler.step()


class _Ranges(Watch):
    """Marks in the profile where each module's forward and each node's backward begin and end."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._where = Whereabouts(model, self._follow)
        self._open: list[Any] = []

    def __enter__(self) -> Self:
        self._where.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._where.__exit__(*error)

    @contextmanager
    def phase(self, phase: Phase, loss: Any = None) -> Iterator[None]:
        """A range for the part; in backward, one for each node too."""
        for node in nodes_of(loss):
            _mark(node, f"backward: {self._where.of_node(node) or 'model'}")
        with record_function(phase):
            yield

    def _follow(self) -> None:
        path = self._where.path()
        while len(self._open) > len(path):
            self._open.pop().__exit__(None, None, None)
        for module in path[len(self._open) :]:
            self._open.append(record_function(self._names.get(module) or type(module).__name__))
            self._open[-1].__enter__()


def _mark(node: Any, name: str) -> None:
    ranges: list[Any] = []

    def begin(gradients: Any) -> None:
        ranges.append(record_function(name))
        ranges[-1].__enter__()

    def end(inputs: Any, outputs: Any) -> None:
        ranges.pop().__exit__(None, None, None)

    node.register_prehook(begin)
    node.register_hook(end)
