"""``Laws``: a cache of memory models on disk, one for each combination of techniques, under ``.autotune/laws``."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, cached_property
from importlib import metadata
from itertools import chain
from pathlib import Path

import torch

from ..apply_plan import build_model
from ..errors import UserError
from ..files import FOLDER, replacing
from ..nested import tensors_in
from ..plan import Plan
from ..randomness import seed_everything, undisturbed
from ..task import Task
from ..techniques import Effect, Settings
from ..unfilled import unfilled
from ..weights import weights_file
from .answers import Target
from .law import MemoryLaw, memory_law
from .law_file import KeptLaw, load_law, packed
from .rehearsal import Rehearsed, Untraceable, largest_sample
from .threads import num_threads

__all__ = ["Laws"]

_WITHOUT_TRACE: tuple[Effect, ...] = ("samples", "process", "loader")
"""Effects of techniques that no trace depends on."""
_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = re.compile(rf"{re.escape(sysconfig.get_path('stdlib'))}/|/(site|dist)-packages/")
"""Folders whose source files are not the user's."""


class Laws:
    """Finds memory models that an earlier process traced, for a task that lies in a file.

    There is one file for each combination. It is written anew where anything has changed that a trace depends on: the
    content of any source file of the user's or of this package, what is installed, the model, its samples' shapes, the
    number of threads, the processor.
    """

    def __init__(self, task: Task, largest_of: int | None, target: Target) -> None:
        """
        Args:
            task: whose laws they are.
            largest_of: where shapes vary, every batch repeats the largest of so many samples.
            target: the device that is planned for.
        """
        self._task, self._largest_of, self._target = task, largest_of or 1, target

    def law(self, plan: Plan, accumulates: bool, few: int | None = None) -> MemoryLaw:
        """The memory model, as :func:`memory_law` makes it. Where few micro-batches are asked for, the model of three
        batches is used if it is kept.

        Raises:
            Untraceable: the training asks for values that fake tensors do not have.
            Exception: whatever the user's code raises.
        """

        @cache
        def traced() -> MemoryLaw:
            """The memory model, traced when first needed."""
            return memory_law(plan, self._task, accumulates, self._largest_of, self._target, few)

        if not self._task.source:
            return traced()
        path = self._path(plan.settings, accumulates)
        law = load_law(path, self._key)
        if law is not None and any(_content(Path(source)) != content for source, content in law.sources.items()):
            law = None
        if law is None or (few is None and not law.batches):
            steps: dict[int, Rehearsed | str] = {} if law is None else law.steps
            found = traced()
            three = dict(zip(found.batches, found.steps, strict=True))
            seen = three if few is None else {few: found.rehearse(few)}
            law = KeptLaw(found.batches, {**steps, **seen}, dict(_sources()))
            self._save(path, law)
        kept = law
        restored = _restored(kept, lambda batch: traced().rehearse(batch), lambda: self._save(path, kept))
        if few is not None and not kept.batches:
            restored.rehearse(few)  # raises where nothing can be traced
        return restored

    def _path(self, settings: Settings, accumulates: bool) -> Path:
        combination = settings.stock(*_WITHOUT_TRACE).canonical()
        said = [self._task.source, combination, accumulates, self._largest_of, self._target]
        return FOLDER / "laws" / f"{_hash(json.dumps(said))[:32]}.json.gz"

    def _save(self, path: Path, law: KeptLaw) -> None:
        """Write the file, where that is possible: a memory model that is not kept is traced again."""
        with suppress(TypeError, OSError, UserError):
            content = packed(self._key, law)
            with replacing(path, UserError) as temporary:
                temporary.write_bytes(content)

    def open(self) -> None:
        """Build the model that the key needs, once for all forks that come."""
        if self._task.source:
            self._key  # noqa: B018

    @cached_property
    def _key(self) -> str:
        """What a trace depends on beside the combination, as a hash."""
        with undisturbed():
            seed_everything(0)
            model = build_model(unfilled(self._task))
            sample = largest_sample(self._task.build_dataset(), self._largest_of)
        named = chain(model.named_parameters(), model.named_buffers())
        said = [
            [torch.backends.cpu.get_cpu_capability(), num_threads()],
            re.sub(r" at 0x[0-9a-f]+", "", repr(model)),
            [[name, str(one.dtype), [*one.shape], one.requires_grad] for name, one in named],
            [[str(one.dtype), [*one.shape]] for one in tensors_in(sample)],
            sorted((own.name, _content(own)) for own in _PACKAGE.rglob("*.py")),
            sorted({f"{one.name} {one.version}" for one in metadata.distributions()}),
            _content(weights) if (weights := weights_file(self._task)) is not None else "",
        ]
        return _hash(json.dumps(said))


def _restored(law: KeptLaw, rehearse: Callable[[int], Rehearsed], save: Callable[[], None]) -> MemoryLaw:
    """A memory model whose steps at other batches are kept too."""

    def step(batch: int) -> Rehearsed:
        """The step at a batch, kept or traced now."""
        if batch not in law.steps:
            try:
                law.steps[batch] = rehearse(batch)
            except Untraceable as error:
                if not isinstance(error.__cause__, ValueError):  # such as no memory, which may be there next time
                    raise
                law.steps[batch] = str(error)
            save()
        found = law.steps[batch]
        if isinstance(found, str):
            raise Untraceable(found)
        return found

    return MemoryLaw(tuple(map(step, law.batches)), step, law.batches)


def _sources() -> Iterator[tuple[str, str]]:
    """Paths of the files that the user's modules were loaded from, with a hash of each."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        name = getattr(getattr(module, "__spec__", None), "name", name)
        if path and name.partition(".")[0] != "autotune" and not _LIBRARIES.search(path):
            yield path, _content(Path(path))


def _content(path: Path) -> str:
    """Hash of a file's content; empty where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
