"""``MemoryModelCache``: memory models on disk, one for each combination of techniques."""

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

from ..errors import UserError
from ..files import FOLDER, replacing
from ..layers.saved_by import SharedSavers
from ..nested import tensors_in
from ..plan import Plan
from ..randomness import seed_everything, undisturbed
from ..task import Task
from ..techniques import Effect, Settings, Stage
from ..training.apply_plan import build_model
from ..training.skip_init import skip_init
from ..training.weights import weights_file
from .allocators.process import Replayed
from .memory_model import MemoryModel, fit_memory_model
from .memory_model_file import StoredModel, load_memory_model, packed
from .tracing.fake_ops import Target
from .tracing.fake_step import TracedStep, Untraceable, largest_sample
from .tracing.real_step import ProbedModel, fit_probed_model
from .types import Largest

WITHOUT_TRACE: tuple[Effect, ...] = ("samples", "process", "loader")
"""Effects of techniques that no trace depends on."""
_MOST_PROBED = 24
_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = re.compile(rf"{re.escape(sysconfig.get_path('stdlib'))}/|/(site|dist)-packages/")
"""Folders whose source files are not the user's."""


class MemoryModelCache:
    """Finds memory models that an earlier process traced, for a task that lies in a file.

    There is one file for each combination. It is written anew where anything has changed that a trace depends on: the
    content of any source file of the user's or of this package, what is installed, the model, its samples' shapes, the
    processor.
    """

    def __init__(self, task: Task, largest_of: Largest | None, target: Target) -> None:
        """
        Args:
            task: whose memory models they are.
            largest_of: where shapes vary, every batch repeats the largest of so many samples.
            target: the device that is planned for.
        """
        self._task, self._largest_of, self._target = task, largest_of or 1, target
        self.replayed: Replayed | None = None
        """Where kept, what allocators keep for traces."""
        self._savers: dict[str, SharedSavers] = {}
        """By what stands before layers."""
        self._probed: dict[tuple[str, bool], MemoryModel | ProbedModel] = {}

    def of(self, plan: Plan, accumulates: bool, few: int | None = None) -> MemoryModel:
        """The memory model, as :func:`fit_memory_model` makes it. Where few micro-batches are asked for, the model
        of three batches is used if it is kept.

        Raises:
            Untraceable: the training asks for values that fake tensors do not have.
            Exception: whatever the user's code raises.
        """

        @cache
        def traced() -> MemoryModel:
            """The memory model, traced when first needed."""
            before = (one for one in plan.settings.techniques() if one.stage < Stage.LAYERS)
            savers = self._savers.setdefault(Settings().having(*before).canonical(), SharedSavers())
            return fit_memory_model(plan, self._task, accumulates, self._largest_of, self._target, few, savers)

        if not self._task.source:
            return traced()
        path = self._path(plan.settings, accumulates)
        memory_model = load_memory_model(path, self._key)
        if memory_model is not None and any(
            _content(Path(source)) != content for source, content in memory_model.sources.items()
        ):
            memory_model = None
        if memory_model is None or (few is None and not memory_model.batches):
            steps: dict[int, TracedStep | str] = {} if memory_model is None else memory_model.steps
            found = traced()
            three = dict(zip(found.batches, found.steps, strict=True))
            seen = three if few is None else {few: found.trace_step(few)}
            memory_model = StoredModel(found.batches, {**steps, **seen}, dict(_sources()))
            self._save(path, memory_model)
        kept = memory_model
        restored = _restored(
            kept, lambda batch: traced().trace_step(batch), lambda: self._save(path, kept), self._target
        )
        if few is not None and not kept.batches:
            restored.trace_step(few)  # raises where nothing can be traced
        return restored

    def probed(self, plan: Plan, accumulates: bool) -> MemoryModel | ProbedModel:
        """The memory model by real steps, as :func:`fit_probed_model` makes it. The last few are kept.

        Raises:
            Exception: whatever the user's code raises.
        """
        plan = plan.model_copy(update={"settings": plan.settings.stock(*WITHOUT_TRACE)})
        key = plan.settings.canonical(), accumulates
        if key not in self._probed:
            found = fit_probed_model(plan, self._task, accumulates, self._largest_of, self._target)
            if len(self._probed) >= _MOST_PROBED:
                del self._probed[next(iter(self._probed))]
            self._probed[key] = found
        return self._probed[key]

    def _path(self, settings: Settings, accumulates: bool) -> Path:
        combination = settings.stock(*WITHOUT_TRACE).canonical()
        said = [self._task.source, combination, accumulates, self._largest_of, self._target]
        return FOLDER / "memory_models" / f"{_hash(json.dumps(said))[:32]}.json.gz"

    def _save(self, path: Path, memory_model: StoredModel) -> None:
        """Write the file, where that is possible: a memory model that is not kept is traced again."""
        with suppress(OSError, UserError):
            content = packed(self._key, memory_model)
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
            model = build_model(skip_init(self._task))
            sample = largest_sample(self._task.build_dataset(), self._largest_of)
        named = chain(model.named_parameters(), model.named_buffers())
        said = [
            torch.backends.cpu.get_cpu_capability(),
            re.sub(r" at 0x[0-9a-f]+", "", repr(model)),
            [[name, str(one.dtype), [*one.shape], one.requires_grad] for name, one in named],
            [[str(one.dtype), [*one.shape]] for one in tensors_in(sample)],
            sorted((own.name, _content(own)) for own in _PACKAGE.rglob("*.py")),
            sorted({f"{one.name} {one.version}" for one in metadata.distributions()}),
            _content(weights) if (weights := weights_file(self._task)) is not None else "",
        ]
        return _hash(json.dumps(said))


def _restored(
    memory_model: StoredModel, trace_step: Callable[[int], TracedStep], save: Callable[[], None], target: Target
) -> MemoryModel:
    """A memory model whose steps at other batches are kept too."""

    def step(batch: int) -> TracedStep:
        """The step at a batch, kept or traced now."""
        if batch not in memory_model.steps:
            try:
                memory_model.steps[batch] = trace_step(batch)
            except Untraceable as error:
                if not isinstance(error.__cause__, ValueError):  # such as no memory, which may be there next time
                    raise
                memory_model.steps[batch] = str(error)
            save()
        found = memory_model.steps[batch]
        if isinstance(found, str):
            raise Untraceable(found)
        return found

    return MemoryModel(tuple(map(step, memory_model.batches)), step, memory_model.batches, target)


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
