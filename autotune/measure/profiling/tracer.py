"""``Tracer``: records every allocation and free of one optimizer step, over real or fake tensors alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...nested import dense_parts, tensors_in
from .allocations import OUTSIDE, Allocation, Kind, Phase, Span, Trace
from .module_tracker import Whereabouts
from .parts import is_in_parts, parts_of
from .watch import Watch

ScratchOf = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], int | None]
"""Gives the workspace of an operation's kernel, bytes, by the operation, its arguments and results; None where it has
none."""
SeesWork = Callable[[Any, tuple[Any, ...], dict[str, Any], Any, tuple[str, Phase]], None]
"""Is called with an operation, its arguments and results, and the module and phase that it ran in."""
Sees = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Is called with an operation that has just run, its arguments and results."""
Shows = Callable[[Sees, Phase], AbstractContextManager[Any]]
"""Makes a context in which every operation of a phase is passed to ``Sees``."""
_LASTING: tuple[Kind, ...] = (
    "other", "temporary", "activation", "batch", "gradient", "optimizer_state", "parameter"
)  # fmt: skip
"""Kinds by precedence: where several apply to a storage, the last of them counts."""


@dataclass(slots=True)
class _Storage:
    id: int
    num_bytes: int
    born: int
    module: str
    phase: Phase
    kind: Kind
    died: int | None = None
    kept_by: str | None = None
    is_scratch: bool = False
    reference: Any = None
    """Weak, to torch's own object, which lives as long as the storage does."""

    def is_at_least(self, kind: Kind, module: str | None = None) -> None:
        """Set the kind and module, unless the storage already has a kind of higher precedence."""
        if _LASTING.index(kind) > _LASTING.index(self.kind):
            self.kind, self.module = kind, module or self.module


class Tracer(Watch):
    """Records one optimizer step. Use as a context around the step, and :meth:`phase` around each of its parts.

    Kernels' workspace is not seen, nor the host's memory on a CUDA device. Hooks are on modules, never on the graph; no
    result changes and nothing lives longer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        sees_saves: bool = True,
        scratch_of: ScratchOf | None = None,
        sees_work: SeesWork | None = None,
        shows: Shows | None = None,
    ) -> None:
        """
        Args:
            model: its parameters, buffers, and the gradients there are count as alive from the start.
            optimizer: its state does too.
            device: whose memory is recorded; for fake tensors, the device that they claim.
            sees_saves: watch what autograd saves, which torch.func's gradients forbid; False takes all that a forward
                leaves behind for kept.
            scratch_of: what kernels take besides; recorded as a temporary that is gone when the operation is.
            sees_work: is shown every operation of the step.
            shows: what operations are seen by; None is a dispatch mode that does no more.
        """
        self._model = model
        self._optimizer = optimizer
        self._device_type = device.type
        self._sees_saves = sees_saves
        self._scratch_of = scratch_of
        self._sees_work = sees_work
        self._shows = shows or _Mode
        self._where = Whereabouts(model)
        self._phase = Phase.BEFORE
        self._moment = 0
        self._spans: list[Span] = []
        self._storages: list[_Storage] = []
        self._live: dict[int, _Storage] = {}
        self._is_open = False

    def __enter__(self) -> Self:
        self._is_open = True
        self._where.__enter__()
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            self._note(tensor, "parameter", self._where.owner(tensor))
        self._name_parameters()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_open = False
        self._where.__exit__(*error)

    @property
    def order(self) -> tuple[str, ...]:
        """Names of the modules that ran, in forward order."""
        return tuple(self._where.order)

    @property
    def num_forward(self) -> int:
        """Allocations that forwards have made so far."""
        return sum(made.phase == Phase.FORWARD for made in self._storages)

    def batch(self, batch: Any) -> None:
        """Record a micro-batch that has arrived."""
        self._phase = Phase.FORWARD
        self._spans.append(Span(Phase.FORWARD, self._moment))
        self._moment += 1
        for tensor in tensors_in(batch):
            self._note(tensor, "batch", OUTSIDE, born=self._moment)

    @contextmanager
    def phase(self, phase: Phase, loss: Any = None) -> Iterator[None]:
        """Record what the body allocates and frees. The loss is not used here."""
        if phase != self._phase:
            self._phase = phase
            self._spans.append(Span(phase, self._moment))
        keeps = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        with keeps if phase == Phase.FORWARD and self._sees_saves else nullcontext(), self._shows(self.see, phase):
            yield
        if phase == Phase.FORWARD and not self._sees_saves:
            self._keep_all()
        self._name_parameters()

    def trace(self) -> Trace:
        """What was recorded."""
        allocations = (
            Allocation(s.id, s.num_bytes, s.born, s.died, s.module, s.phase, s.kind, s.kept_by, s.is_scratch)
            for s in self._storages
        )
        return Trace(tuple(allocations), tuple(self._spans), self._moment + 1)

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> None:
        """Record an operation that has just run. An argument that no operation made was there before the step."""
        if func is not torch.ops.aten.lift_fresh.default:  # torch.tensor(...): its argument was made just now
            for tensor in tensors_of((args, kwargs)):
                self._note(tensor, "other", OUTSIDE, born=0)
        for tensor in tensors_of(results):
            self._note(tensor, "temporary", None)
        if self._scratch_of is not None:
            self._note_scratch(self._scratch_of(func, args, kwargs, results))
        if self._sees_work is not None:
            self._sees_work(func, args, kwargs, results, self._place())

    def _note_scratch(self, num_bytes: int | None) -> None:
        """Record the workspace of an operation's kernel."""
        if num_bytes is None:
            return
        module, phase = self._place()
        born, self._moment = self._moment + 1, self._moment + 2
        made = _Storage(len(self._storages), num_bytes, born, module, phase, "temporary", self._moment, is_scratch=True)
        self._storages.append(made)

    def _place(self) -> tuple[str, Phase]:
        """The module that is running, and the phase."""
        module, in_backward = self._where.now()
        return module, Phase.BACKWARD if in_backward else self._phase

    def _keep(self, tensor: Tensor) -> Tensor:
        for storage in _storages(tensor, self._device_type):
            found = self._live.get(storage._cdata)
            if found is not None and found.kept_by is None:
                found.kept_by = self._where.now()[0]
                found.is_at_least("activation")
        return tensor

    def _keep_all(self) -> None:
        for made in self._live.values():
            if made.phase == Phase.FORWARD and made.kept_by is None:
                made.kept_by = made.module
                made.is_at_least("activation")

    def _name_parameters(self) -> None:
        """Record what parameters hold by now: gradients, and their optimizer state."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                owner = self._where.owner(parameter)
                self._note(parameter, "parameter", owner)
                for tensor in tensors_of(self._optimizer.state.get(parameter)):
                    self._note(tensor, "optimizer_state", owner)
        for parameter in (*self._model.parameters(), *(p for g in self._optimizer.param_groups for p in g["params"])):
            if parameter.grad is not None:
                self._note(parameter.grad, "gradient", self._where.owner(parameter))

    def _note(self, tensor: Tensor, kind: Kind, module: str | None, born: int | None = None) -> None:
        """Record a tensor's storage, if it is new, and its kind.

        Args:
            tensor: any.
            kind: what it is at least.
            module: whose it is; None asks who is at work.
            born: the moment, if it is not now: 0, or one that several share.
        """
        for storage in _storages(tensor, self._device_type):
            found = self._live.get(storage._cdata)
            if found is None or (found.num_bytes != storage.nbytes() and born is None):
                if found is not None:  # resized: as if it had been freed and had again
                    self._free(storage._cdata)
                found = self._live[storage._cdata] = self._allocate(storage, kind, module, born)
            found.is_at_least(kind, module)

    def _allocate(self, storage: Any, kind: Kind, module: str | None, born: int | None) -> _Storage:
        phase = self._phase if born != 0 else Phase.BEFORE
        if born is None and self._phase != Phase.BEFORE:
            self._moment += 1
            born = self._moment
        if module is None:
            module, in_backward = self._where.now()
            phase = Phase.BACKWARD if in_backward else phase
        made = _Storage(len(self._storages), storage.nbytes(), born or 0, module, phase, kind)
        key, owner = storage._cdata, weakref.ref(self)

        def freed(_: Any) -> None:
            tracer = owner()
            if tracer is not None and tracer._live.get(key) is made:
                tracer._free(key)

        made.reference = weakref.ref(storage, freed)
        self._storages.append(made)
        return made

    def _free(self, key: int) -> None:
        made = self._live.pop(key)
        if self._is_open:
            self._moment += 1
            made.died = self._moment


class MostAlive:
    """Most bytes at once of the storages that operations make within it, where nothing else of a step is known."""

    def __init__(self, device_type: str) -> None:
        """
        Args:
            device_type: whose memory is counted.
        """
        self.num_bytes = 0
        """The most so far."""
        self._device_type, self._alive = device_type, 0
        self._known: dict[int, Any] = {}
        """References to storages that are there, made within or before."""
        self._mode = _Mode(self._see, Phase.FORWARD)

    def __enter__(self) -> Self:
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)  # type: ignore[no-untyped-call]

    def _see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> None:
        for tensor in tensors_of((args, kwargs)):
            for storage in _storages(tensor, self._device_type):
                self._note(storage, 0)
        for tensor in tensors_of(results):
            for storage in _storages(tensor, self._device_type):
                self._note(storage, storage.nbytes())
        self.num_bytes = max(self.num_bytes, self._alive)

    def _note(self, storage: Any, num_bytes: int) -> None:
        key, owner = storage._cdata, weakref.ref(self)
        if key in self._known:
            return

        def freed(_: Any) -> None:
            if (its := owner()) is not None and its._known.pop(key, None) is not None:
                its._alive -= num_bytes

        self._known[key] = weakref.ref(storage, freed)
        self._alive += num_bytes


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows each operation."""

    def __init__(self, sees: Sees, phase: Phase) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sees = sees

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_in_parts(types):
            return NotImplemented
        if (parts := parts_of(func, args)) is not None:
            with self:
                return parts(*args, **(kwargs or {}))
        results = func(*args, **(kwargs or {}))
        self._sees(func, args, kwargs or {}, results)
        return results


def tensors_of(tree: Any) -> Iterable[Tensor]:
    """The tensors among arguments or results, nested at most once: torch's general function would take most of the
    time."""
    if isinstance(tree, Tensor):
        return (tree,)
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return ()
    found: list[Tensor] = []
    for branch in tree:
        if isinstance(branch, Tensor):
            found.append(branch)
        elif isinstance(branch, (list, tuple, dict)):
            found += tensors_of(branch)
    return found


def _storages(tensor: Tensor, device_type: str) -> tuple[Any, ...]:
    """The storages of a tensor on this device; none for a tensor without a torch storage."""
    if tensor.device.type != device_type:
        return ()
    try:
        if tensor.layout is torch.strided:  # as nearly all
            return (tensor.untyped_storage(),)
        return tuple(part.untyped_storage() for part in dense_parts(tensor))
    except (NotImplementedError, RuntimeError, ValueError):  # opaque to torch as well: oneDNN's, or not there yet
        return ()
