"""Acts right after a module has been imported, whoever imports it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, act: Callable[[], None]) -> None:
    """Call ``act`` right after the module ``name`` has been imported, or now if it is."""
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder(MetaPathFinder):
    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name, self._act = name, act
        self._is_asking = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._arrived)
        return spec

    def _arrived(self) -> None:
        """Only now, and not once the module was found: many ask for it before they import it."""
        sys.meta_path.remove(self)
        self._act()


class _Loader(Loader):
    """The module's own loader, and then the act; the module does not keep it."""

    def __init__(self, own: Loader, act: Callable[[], None]) -> None:
        self._own, self._act = own, act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._own
        self._own.exec_module(module)
        self._act()
