"""Records what a script's training does, by torch's own objects: Python imports this as it starts, where PYTHONPATH
names this folder. It knows nothing of the package that is looked at, lies beneath its hooks, and draws no numbers.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from recorded_in_full import PLACE, Recorder

NUM_STEPS = os.environ.get("SAME_TRAINING_STEPS")
"""Where it is set, a training is recorded in brief, and ends after so many optimizer steps."""


def _recorder() -> Recorder:
    if NUM_STEPS is None:
        return Recorder()
    from recorded_in_brief import BriefRecorder

    return BriefRecorder(int(NUM_STEPS))


class _Finder(MetaPathFinder):
    """Waits for torch, below whoever else waits for it."""

    _is_asking = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch" or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(Loader):
    def __init__(self, own: Loader, finder: _Finder) -> None:
        self._own, self._finder = own, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._own
        self._own.exec_module(module)
        sys.meta_path.remove(self._finder)
        _recorder().install(module)


if PLACE:
    sys.meta_path.insert(0, _Finder())
