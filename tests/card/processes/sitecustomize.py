"""The stand-in in every process that is started with this folder on ``PYTHONPATH``: two cards that several use.

``CARD_FOLDER`` is a folder that they share: each that has a card open says in a file of its own what the card charges
it. Time is real: what is queued is waited for in sleep.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Before(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Puts the cards in place once a module has been imported."""

    def __init__(self, module: str, stand_in: str) -> None:
        self._module, self._stand_in = module, stand_in
        self._is_within = False
        self._real: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._module or self._is_within:
            return None
        self._is_within = True
        try:
            found = importlib.util.find_spec(name)
        finally:
            self._is_within = False
        if found is not None:
            self._real, found.loader = found.loader, self
        return found

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._real.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)
        self._real.exec_module(module)
        importlib.import_module(self._stand_in).put_in_place()


if "CARD_FOLDER" in os.environ and "torch.distributed.run" not in sys.orig_argv:  # torchrun itself uses none
    sys.meta_path[:0] = [_Before("pynvml", "two_cards"), _Before("torch", "shared_card")]
