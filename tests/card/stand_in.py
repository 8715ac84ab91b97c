"""A stand-in for a CUDA card: this package's own code runs over it with ``device="cuda"``, on a machine without one.

Tensors that are put on the card lie in host memory, are computed by the CPU, and say that they are on ``cuda:0``. Time
is simulated: nothing sleeps, and equal runs take equal times. A test sets what the card is like, and reads what was
done to it::

    def test_a_step_waits_once(card):            # the fixture; or: with Card(total_bytes=8 * GIB).in_place() as card
        card.context_bytes = 300 * MIB           # any field, at any time
        def compute_loss(model, batch):
            card.work(0.1)                       # 100 ms on the card: queued, the host goes on
            card.host(0.02)                      # 20 ms on the host
            return model(batch).mean()
        training.step(batch).loss.item()         # waits: the clock goes on until the queue is done
        assert card.waits == ["item"]

What it has:

- a clock and streams. ``work`` queues on the current one, ``host`` passes time, each operation costs the host
  ``launch_s`` and the card ``kernel_s``, a copy between card and host its bytes by ``link_bytes_per_s``.
  ``torch.cuda.synchronize``, ``.item()``, copies from pageable memory, ``nonzero`` and the like wait, and leave their
  names in ``waits``. What a stream reads or writes while another writes it, or what is freed under it, stands in
  ``races``. ``perf_counter``, ``monotonic``, ``process_time`` and ``time.sleep``, as the modules of this package that
  run in a trial have them, follow this clock.
- memory: storages on the card are blocks of this package's ``CachingAllocator``, within the cap of
  ``set_per_process_memory_fraction`` and what the card has free. What does not fit even once cached segments are given
  back raises ``torch.OutOfMemoryError``. The context grows at the first matrix product and the first convolution.
- what NVML, ``nvidia-smi`` and ``torch.cuda`` tell: other processes and their bytes, processes that are hidden
  (``pids_hidden``), MIG, unified memory (NVML knows of no bytes), clocks, throttling, power, other cards (``beside``).
- faults: ``card.fails["convolution"] = TEXTS["cudnn_engine"]`` makes the next convolution raise that text.

What it has not: kernels' own rounding, a CUDA device's list of autocast, ``torch.compile``,
other processes (a loader's worker that uses a tensor on the card raises what CUDA raises there).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import math
import os
import re
import sys
import time
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pynvml
import pytest
import torch
import torch._dynamo  # its import reads torch.cuda, which is to be the real one then
import torch.distributed
from told import GIB, Told, nvml
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from autotune.estimates.allocators.cuda_caching import CachingAllocator
from autotune.estimates.allocators.free_list import Block
from autotune.measure.profiling.parts import is_in_parts
from autotune.techniques.optimizers import optimizer_step
from autotune.techniques.support.disk.offloaded_weight import OffloadedWeight
from autotune.units import MIB

TEXTS: Mapping[str, str] = {
    "cublas_create": "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cublas_alloc": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cudnn_create": "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "cudnn_internal": "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "cudnn_engine": "FIND was unable to find an engine to execute this computation",
    "cudnn_get_engine": "GET was unable to find an engine to execute this computation",
    "cudnn_algorithm": "Unable to find a valid cuDNN algorithm to run convolution",
    "cusolver": "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cufft": "cuFFT error: CUFFT_ALLOC_FAILED",
    "triton": "Triton Error [CUDA]: out of memory",
    "driver": "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n",
    "assert": "CUDA error: device-side assert triggered\n",
    "illegal": "CUDA error: an illegal memory access was encountered\n",
}
"""What libraries and the driver say when they fail. Source: torch 2.13, aten/src/ATen/native/cudnn/Conv_v8.cpp,
aten/src/ATen/cuda/CUDABlas.cpp, aten/src/ATen/cudnn/Exceptions.h, c10/cuda/CUDAException.cpp."""

_KINDS = {
    "convolution": "convolution",
    "cudnn_convolution": "convolution",
    "mm": "matmul",
    "addmm": "matmul",
    "bmm": "matmul",
    "baddbmm": "matmul",
}
"""By the name of an operation, as ``Card.fails`` names its kind; any other is its own."""
_WAIT = {"_local_scalar_dense": "item", "nonzero": "nonzero", "masked_select": "masked_select", "equal": "equal"}
"""Operations that read from the card, and what they are called in ``Card.waits``."""
_CLOCKED = ("autotune.measure.", "autotune.script.", "autotune.training.", "autotune.techniques.", "autotune.data.")
"""Modules whose clock is the card's."""
_TRIAL = ("autotune.workers.trial.child", "autotune.measure.inspect", "autotune.script.trial.look")
"""With what they import, modules that are there before clocks are set."""
_OWN_CLOCK = "autotune.measure.timing.disturbance"
"""Watches the machine that tests run on."""
_THREAD_CLOCK = "autotune.measure.timing.card"
"""Is read in a thread, which passes no time of the card's."""


@dataclass
class Card(Told):
    """A card, and the process that uses it; see the module."""

    beside: Sequence[Card] = ()
    """Other cards of this machine, which nothing runs on."""

    launch_s: float = 5e-6
    """Host time of an operation."""
    kernel_s: float = 0.0
    """The card's time of an operation, beside ``work``."""
    link_bytes_per_s: float = math.inf
    """Of copies between the card and the host's memory."""
    read_s: float = 1e-6
    """What reading the clock takes, so that a loop that waits for the clock ends."""
    most_queued: int = 1024
    """Operations that the driver queues; the host waits with the next."""

    context_bytes: int = 400 * MIB
    """As a process opens it."""
    cublas_bytes: int = 32 * MIB
    """What the context grows by at the first matrix product."""
    cudnn_bytes: int = 48 * MIB
    """What it grows by at the first convolution."""

    fails: dict[str, str | BaseException] = field(default_factory=dict)
    """By kind of operation, what the next of it raises: once, and then it works again."""

    now_s: float = field(default=1000.0, init=False)
    """The simulated clock."""
    waits: list[str] = field(default_factory=list, init=False)
    """What made the host wait for the card, in order; clear it at will."""
    most_charged_bytes: int = field(default=0, init=False)
    """The most that it ever charged this process."""
    races: list[str] = field(default_factory=list, init=False)
    """What streams do to each other's memory, in order: nothing made one wait for the other."""
    calls: list[str] = field(default_factory=list, init=False)
    """Names of operations on the card, in order."""

    def __post_init__(self) -> None:
        self.stream = _Stream(self)
        """The current one."""
        self.streams = [self.stream]
        self._uses: dict[int, list[_Use]] = {}
        self._allocator = _Allocator(self)
        self._marks: dict[int, Any] = {}
        self._pinned: set[int] = set()
        self._recorded: dict[int, set[_Stream]] = {}
        self._known: dict[int, Any] = {}
        self.fraction = 1.0
        self.is_open = False
        self._at_opening: list[Callable[[], None]] = []
        self._opened_by = 0
        self.warns = False
        self._grown: set[str] = set()
        self._placing: bool | None = None

    # Time.

    def host(self, seconds: float) -> None:
        """The host computes."""
        self.now_s += seconds

    def work(self, seconds: float) -> None:
        """The card is given something to do; the host goes on, unless too much is queued already."""
        queue = self.stream.queue
        while queue and queue[0] <= self.now_s:
            queue.popleft()
        if len(queue) >= self.most_queued:
            self.now_s = max(self.now_s, queue.popleft())
        self.stream.free_at_s = max(self.now_s, self.stream.free_at_s) + seconds
        queue.append(self.stream.free_at_s)

    def wait(self, why: str) -> None:
        """The host waits until all that is queued on the current stream is done; to synchronize, on every one."""
        self.waits.append(why)
        if self.warns:
            frame = inspect.currentframe()
            while frame is not None and _is_own(frame.f_code.co_filename):
                frame = frame.f_back
            assert frame is not None, "whoever asked"
            words = f"called a synchronizing CUDA operation: {why}"
            warnings.warn_explicit(words, UserWarning, frame.f_code.co_filename, frame.f_lineno)
        streams = self.streams if why == "synchronize" else [self.stream]
        self.now_s = max(self.now_s, *(one.free_at_s for one in streams))

    @contextlib.contextmanager
    def on(self, stream: _Stream | None) -> Iterator[None]:
        """Within, it is the current stream; None is the one that is."""
        before, self.stream = self.stream, stream or self.stream
        try:
            yield
        finally:
            self.stream = before

    # Several cards.

    @property
    def every(self) -> Sequence[Told]:
        """The machine's, by NVML's numbers."""
        return (self, *self.beside)

    @property
    def visible(self) -> Sequence[Told]:
        """Those that this process sees, by CUDA's numbers."""
        return self.every

    @property
    def number(self) -> int:
        """CUDA's, of the card that this process uses."""
        return 0

    def take(self, number: int) -> None:
        """Use that card from here on; but nothing runs on those that are ``beside``."""

    # Memory.

    @property
    def own_bytes(self) -> int:
        """What the card charges this process: its context, and what its allocator reserves."""
        return self._context() + self._allocator.reserved_bytes

    def note_charge(self) -> None:
        """What it charges this process has changed."""
        self.most_charged_bytes = max(self.most_charged_bytes, self.own_bytes)

    @property
    def most_reserved_bytes(self) -> int:
        """What the cap leaves to the allocator."""
        return int(self.fraction * self.total_bytes)

    def open(self) -> None:
        """This process opens its context."""
        if self.is_open and self._opened_by != os.getpid():
            raise RuntimeError(
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
                "'spawn' start method"
            )
        if self.is_open:
            return
        waiting, self._at_opening = self._at_opening, []
        try:
            for act in waiting:  # ``_lazy_init`` calls them before torch counts as initialized
                act()
        except Exception as error:
            self._at_opening = waiting
            raise torch.cuda.DeferredCudaCallError(f"CUDA call failed lazily at initialization: {error}") from error
        if not self.is_open and self.context_bytes > self.free_bytes:
            raise RuntimeError(TEXTS["driver"])
        self.is_open, self._opened_by = True, os.getpid()

    def _context(self) -> int:
        grown = {"matmul": self.cublas_bytes, "convolution": self.cudnn_bytes}
        return self.context_bytes + sum(grown[kind] for kind in self._grown) if self.is_open else 0

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the card."""
        return tensor.layout == torch.strided and _key(tensor) in self._marks

    def _put(self, tensor: torch.Tensor) -> None:
        if tensor.layout != torch.strided or (key := _key(tensor)) in self._marks:
            return
        storage = tensor.untyped_storage()
        self.open()
        self._marks[key] = self._allocator.allocate(storage.nbytes())
        weakref.finalize(storage, self._leave, key, self.stream).atexit = False

    def record(self, tensor: torch.Tensor, stream: _Stream) -> None:
        """``Tensor.record_stream``: its memory is not used again before what is queued there by then is done."""
        self._recorded.setdefault(_key(tensor), set()).add(stream)

    def _leave(self, key: int, stream: _Stream) -> None:
        """What was made on a stream is its to use again, as soon as it has done what is queued."""
        free_at_s = max(self.now_s, stream.free_at_s)
        known = {stream, *self._recorded.pop(key, ())}
        late = [one for one in self._uses.pop(key, []) if one.stream not in known and one.ends_s > free_at_s]
        self.races += [f"freed while {one.name} of another stream uses it" for one in late]
        self._allocator.free(self._marks.pop(key, None))

    def _note_uses(self, function: Any, given: Sequence[torch.Tensor], out: Any, began_s: float) -> None:
        """Of memory of the card, and of pinned memory, by an operation of the current stream."""
        name, schema = function.overloadpacket.__name__, function._schema
        own = {_key(one) for one in given if one.layout == torch.strided}
        strided = [_key(one) for one in _tensors(out) if one.layout == torch.strided]
        is_view = not schema.is_mutable and own.issuperset(strided)
        if is_view or name in ("set_", "detach_"):
            return
        written = {key for key in strided if schema.is_mutable or key not in own}
        for key in {*written, *own}:
            if key not in self._marks and key not in self._pinned:
                continue
            uses, writes = self._uses.setdefault(key, []), key in written
            others = [one for one in uses if one.stream is not self.stream and (writes or one.writes)]
            self.races += [f"{name} while {one.name} of another stream" for one in others if one.ends_s > began_s]
            ended_s = self.stream.free_at_s
            uses[:] = [one for one in uses if (one.stream, one.writes) != (self.stream, writes)]
            uses.append(_Use(self.stream, writes, ended_s, name))

    # Operations.

    def _run(self, function: Any, args: Any, kwargs: Any) -> Any:
        given = _tensors((args, kwargs))
        on_card = any(self.holds(one) for one in given)
        name = function.overloadpacket.__name__
        began_s = 0.0
        if on_card:
            began_s = self._begin(name)
            self._wait_for(name, given, args, kwargs)
        out = _compute(function, name, given, args, kwargs)
        if not given and self.is_open and torch._C._current_graph_task_id() != -1:
            on_card = True  # backward of a function of ours makes a tensor, whose device no function mode sees
        if self._placing if self._placing is not None else on_card:
            own = {_key(one) for one in given if one.layout == torch.strided}
            for one in _tensors(out):
                if one.layout == torch.strided and _key(one) not in own:
                    self._put(one)
        if began_s:
            self._note_uses(function, given, out, began_s)
        return out

    def _begin(self, name: str) -> float:
        """When it begins on its stream."""
        self.open()
        kind = _KINDS.get(name.removesuffix("_backward"), name)
        self.calls.append(name)
        if (failure := self.fails.pop(kind, None)) is not None:
            raise failure if isinstance(failure, BaseException) else RuntimeError(failure)
        if kind in ("matmul", "convolution") and kind not in self._grown:
            self._grown.add(kind)
            self.note_charge()
        self.host(self.launch_s)
        began_s = max(self.now_s, self.stream.free_at_s)
        self.work(self.kernel_s)
        return began_s

    def _wait_for(self, name: str, given: Sequence[torch.Tensor], args: Any, kwargs: Any) -> None:
        if name in _WAIT:
            self.wait(_WAIT[name])
        elif name in ("index", "index_put", "index_put_") and self.holds(args[0]):
            indices = [one for one in args[1] if one is not None]
            if any(not self.holds(one) for one in indices):
                self.wait("index from the host")  # (torch 2.13, aten/src/ATen/native/TensorAdvancedIndexing.cpp)
            elif any(one.dtype in (torch.bool, torch.uint8) for one in indices):
                self.wait("nonzero")
        elif name == "copy_" and self.holds(args[0]) != self.holds(args[1]) and args[1].dim():
            self._copied(args[1], self.holds(args[1]), bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))

    def _copied(self, source: torch.Tensor, comes_back: bool, non_blocking: bool) -> None:
        """A copy between host and card waits, unless it is asked not to, and host memory is pinned
        (torch 2.13, aten/src/ATen/native/cuda/Copy.cu: ``memcpy_and_sync``; CUDA's "API synchronization behavior")."""
        if self.link_bytes_per_s < math.inf:
            self.work(source.nbytes / self.link_bytes_per_s)
        if not (non_blocking and (comes_back or self.is_pinned(source))):
            self.wait("copy to the host" if comes_back else "copy from pageable memory")

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in page-locked memory."""
        return _key(tensor) in self._pinned

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its copy in page-locked memory."""
        if self.is_pinned(tensor):
            return tensor
        copied = tensor.detach().clone()
        storage, key = copied.untyped_storage(), _key(copied)
        self._pinned.add(key)
        weakref.finalize(storage, self._unpin, key).atexit = False
        return copied

    def _unpin(self, key: int) -> None:
        """Its memory is used again once streams have done with it (torch 2.13, CachingHostAllocator.h)."""
        self._pinned.discard(key)
        self._uses.pop(key, None)

    def move(self, tensor: torch.Tensor, to_card: bool, function: Any, args: Any, kwargs: Any) -> Any:
        """``tensor.to(…)`` with an explicit device, which ``args`` and ``kwargs`` no longer have."""
        if self.holds(tensor) == to_card:
            return function(tensor, *args, **kwargs)
        if isinstance(tensor, OffloadedWeight):  # its numbers are not where it is
            return function(seen_by(self, tensor.moved)(torch.device("cuda" if to_card else "cpu")), *args, **kwargs)
        self._copied(tensor, not to_card, bool(kwargs.get("non_blocking")))
        with self.placing(to_card):
            return function(tensor, *args, **{**kwargs, "copy": True})

    @contextlib.contextmanager
    def placing(self, on_card: bool) -> Iterator[None]:
        """What is made within is on the card, or not, whatever it is made of."""
        before, self._placing = self._placing, on_card
        try:
            yield
        finally:
            self._placing = before

    # In place.

    @contextlib.contextmanager
    def in_place(self) -> Iterator[Card]:
        """Within, it is this machine's card."""
        with pytest.MonkeyPatch.context() as patch:
            self._patch_clock(patch)
            _patch_torch(patch, self)
            for name, function in nvml(self).items():
                patch.setattr(pynvml, name, function)
            patch.setattr(sys.modules[__name__], "_in_place", self)
            with _Dispatch(self), _Function(self):
                yield self

    def _patch_clock(self, patch: pytest.MonkeyPatch) -> None:
        for name in _TRIAL:
            importlib.import_module(name)
        _patch_clock(patch, self)


_ON_THE_WAY = (
    "shared_card.py",
    "torch/overrides.py",
    "torch/_dynamo/eval_frame.py",
    "torch/utils/_python_dispatch.py",
    "torch/_compile.py",
    "torch/_ops.py",
)


def _is_own(filename: str) -> bool:
    """Of this module, or of what torch goes through on its way here."""
    return filename == __file__ or filename.endswith(_ON_THE_WAY)


_in_place: Card | None = None


def in_use() -> Card:
    """The card that is in place, for task files and scripts."""
    assert _in_place is not None, "no card is in place"
    return _in_place


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(value: Any) -> list[torch.Tensor]:
    """Those that an operation takes or gives, by themselves or in lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for one in value for tensor in _tensors(one)]


def _compute(function: Any, name: str, given: Sequence[torch.Tensor], args: Any, kwargs: Any) -> Any:
    """What the CPU makes of it. It multiplies matrices of fp16 thirty times as slowly as those of fp32; a card adds
    their products in fp32, too."""
    is_slow = _KINDS.get(name) == "matmul" and not kwargs and all(one.dtype == torch.float16 for one in given)
    if not is_slow:
        return function(*args, **kwargs)
    return function(*(one.float() if isinstance(one, torch.Tensor) else one for one in args)).half()


class _Allocator(CachingAllocator):
    """Within what the card has: cached segments are given back first (``release_cached_blocks``), then it is out of
    memory."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card, self._next = card, 0
        self.allocated_bytes = self.most_allocated_bytes = self.most_reserved_bytes = self.num_retries = 0

    def allocate(self, num_bytes: int) -> Block | None:
        block = super().allocate(num_bytes)
        self.allocated_bytes += block.num_bytes if block is not None else 0
        self.most_allocated_bytes = max(self.most_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block | None) -> None:
        self.allocated_bytes -= block.num_bytes if block is not None else 0
        super().free(block)

    def release(self) -> None:
        """Give whole free segments back."""
        for pool in self._pools.values():
            for block in [one for one in pool if one.before is None and one.after is None]:
                self.reserved_bytes -= pool.take(block).num_bytes

    def _new_segment(self, size: int) -> Block:
        before = self.reserved_bytes
        block = super()._new_segment(size)
        self.reserved_bytes = before
        if not self._fits(block.num_bytes):
            self.release()
            self.num_retries += 1
            if not self._fits(block.num_bytes):
                self._raise(size)
        self.reserved_bytes += block.num_bytes
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)
        block.address, self._next = self._next, self._next + block.num_bytes
        self._card.note_charge()
        return block

    def _fits(self, num_bytes: int) -> bool:
        card = self._card
        return self.reserved_bytes + num_bytes <= card.most_reserved_bytes and num_bytes <= card.free_bytes

    def _raise(self, size: int) -> None:
        card, gib = self._card, 1 / GIB
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {size / MIB:.2f} MiB. GPU 0 has a total capacity of "
            f"{card.total_bytes * gib:.2f} GiB of which {card.free_bytes * gib:.2f} GiB is free. Of the allocated "
            f"memory {self.allocated_bytes * gib:.2f} GiB is allocated by PyTorch, and "
            f"{(self.reserved_bytes - self.allocated_bytes) * gib:.2f} GiB is reserved by PyTorch but unallocated."
        )


class _Dispatch(TorchDispatchMode):
    """Sees every operation, backward's too: what is made of tensors on the card is on the card."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_in_parts(types):
            return NotImplemented
        return self._card._run(func, args, kwargs or {})


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, torch.device) and device.type == "cuda") or (
        isinstance(device, str) and re.fullmatch(r"cuda(:\d+)?", device) is not None
    )


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (
        isinstance(value, str) and re.match(r"(cpu|cuda|meta)\b", value) is not None
    )


class _Function(TorchFunctionMode):
    """Sees devices before torch does, which knows no card: they become the host's, and what is made is on the card."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        card, kwargs = self._card, kwargs or {}
        own = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if (told := _TOLD.get(func)) is not None and own is not None:
            return told(card, own) if card.holds(own) else func(*args, **kwargs)
        if func is torch.Tensor.backward and own is not None:
            with self:  # what hooks and checkpoints compute in it are seen too
                return _backward(*args, **kwargs)
        if func is torch.Tensor.cuda:
            return card.move(own, True, torch.Tensor.to, (), {"non_blocking": _second(args, kwargs)})
        if func is torch.Tensor.cpu:
            return card.move(own, False, torch.Tensor.to, (), {})
        if func is torch.Tensor.to:
            return self._to(own, args[1:], kwargs)
        if own is not None and func in (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__):
            if card.holds(own) and func is not torch.Tensor.tolist:
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor")
            if card.holds(own):
                card.wait("tolist")
            return func(*args, **kwargs)
        named = [one for one in (*args, *kwargs.values()) if _is_device(one)]
        is_below = isinstance(func, torch._ops.OpOverload)  # another dispatch mode's call: devices are the host's there
        if not named or is_below or func in _LEFT_ALONE:
            return func(*args, **kwargs)
        is_cuda = _is_cuda(named[0])
        if is_cuda:
            card.open()
            args, kwargs = tree_map(_on_host, args), tree_map(_on_host, kwargs)
            if func in (torch.tensor, torch.as_tensor):
                card.wait("copy from pageable memory")
        with card.placing(is_cuda):
            return func(*args, **kwargs)

    def _to(self, own: torch.Tensor, args: Any, kwargs: Any) -> Any:
        card = self._card
        if args and isinstance(args[0], torch.Tensor):
            args = (torch.device("cuda") if card.holds(args[0]) else args[0].device, args[0].dtype, *args[1:])
        named = [one for one in (*args[:1], kwargs.get("device")) if _is_device(one)]
        rest = [one for one in args if not _is_device(one) and one is not None]
        options = {name: value for name, value in kwargs.items() if name != "device"}
        flags = [one for one in rest if isinstance(one, bool)]
        options |= dict(zip(("non_blocking", "copy"), flags, strict=False))
        if dtypes := [one for one in rest if isinstance(one, torch.dtype)]:
            options["dtype"] = dtypes[0]
        if not named or torch.device(named[0]).type == "meta":
            return torch.Tensor.to(own, *args, **kwargs)
        if _is_cuda(named[0]):
            card.open()
        return card.move(own, _is_cuda(named[0]), torch.Tensor.to, (), options)


def seen_by(card: Card, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that torch calls within an operation, such as a reentrant checkpoint's, where no function mode is
    asked."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _Function(card):
            return function(*args, **kwargs)

    return call


def _backward(
    loss: torch.Tensor,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    torch.autograd.backward(loss, gradient, retain_graph, create_graph, inputs=inputs)


def _on_host(value: Any) -> Any:
    return torch.device("cpu") if _is_cuda(value) else value


def _second(args: Any, kwargs: Any) -> bool:
    return bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))


_TOLD: dict[Any, Callable[[Card, torch.Tensor], Any]] = {
    torch.Tensor.device.__get__: lambda card, tensor: torch.device("cuda", card.number),
    torch.Tensor.is_cuda.__get__: lambda card, tensor: True,
    torch.Tensor.is_cpu.__get__: lambda card, tensor: False,
    torch.Tensor.get_device: lambda card, tensor: card.number,
}
"""What a tensor on the card says of itself."""

_LEFT_ALONE = (torch.device, torch.autocast, torch._C._nn._parse_to)
"""They take devices, and make no tensor."""


class _Event:
    """``torch.cuda.Event``."""

    def __init__(self, card: Card, enable_timing: bool = False, **_: Any) -> None:
        self._card, self._times, self._at_s = card, enable_timing, None

    def record(self, stream: Any = None) -> None:
        card = self._card
        card.open()
        self._at_s = max(card.now_s, (stream or card.stream).free_at_s)

    def query(self) -> bool:
        return self._at_s is None or self._at_s <= self._card.now_s

    def synchronize(self) -> None:
        self._card.waits.append("event")
        self._card.now_s = max(self._card.now_s, self._at_s or 0.0)

    def elapsed_time(self, other: _Event) -> float:
        """Milliseconds. As in torch, both have to be over."""
        if self._at_s is None or other._at_s is None or not self._times or not other._times:
            raise ValueError("Both events must be created with argument 'enable_timing=True' and recorded.")
        if not (self.query() and other.query()):
            raise RuntimeError("CUDA error: device not ready")
        return (other._at_s - self._at_s) * 1000


@dataclass(frozen=True)
class _Use:
    """Of a storage's memory."""

    stream: _Stream
    writes: bool
    ends_s: float
    name: str
    """Of the operation."""


class _Stream:
    """``torch.cuda.Stream``: what is queued on it is done in order."""

    def __init__(self, card: Card) -> None:
        self._card, self.free_at_s = card, 0.0
        self.queue: deque[float] = deque()
        """When each of what is queued is done."""

    def synchronize(self) -> None:
        with self._card.on(self):
            self._card.wait("stream.synchronize")

    def is_capturing(self) -> bool:
        return False

    def wait_stream(self, stream: Any) -> None:
        """What is queued from here on waits for what is queued there by now."""
        self.free_at_s = max(self.free_at_s, stream.free_at_s)

    def wait_event(self, event: Any) -> None:
        """The same, until the event."""
        self.free_at_s = max(self.free_at_s, event._at_s or 0.0)

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event(self._card)
        event.record(self)
        return event


def _patch_clock(patch: pytest.MonkeyPatch, card: Card) -> None:
    def now() -> float:
        card.now_s += card.read_s
        return card.now_s

    clock = types.SimpleNamespace(**vars(time))
    clock.perf_counter = clock.monotonic = clock.process_time = now
    clock.sleep = card.host
    named = {time.perf_counter: now, time.monotonic: now, time.process_time: now, time: clock}
    for name, module in list(sys.modules.items()):
        if name not in (_OWN_CLOCK, _THREAD_CLOCK) and (f"{name}.".startswith(_CLOCKED) or name == _TRIAL[0]):
            for word, value in list(vars(module).items()):
                if isinstance(value, types.ModuleType | types.BuiltinFunctionType) and value in named:
                    patch.setattr(module, word, named[value])
    patch.setattr(f"{_OWN_CLOCK}._waited_s", lambda: 0.0)
    patch.setattr(f"{_OWN_CLOCK}._LATE_S", float("inf"))


def _patch_torch(patch: pytest.MonkeyPatch, card: Card) -> None:
    allocator = card._allocator

    def numbered(device: Any) -> int:
        index = device if isinstance(device, int) or device is None else torch.device(device).index
        return card.number if index is None else int(index)

    def take(device: Any) -> None:
        card.take(numbered(device))
        card.open()

    def properties(device: Any = None) -> Any:
        one = card.visible[numbered(device)]
        return types.SimpleNamespace(
            name=one.name,
            total_memory=one.total_bytes,
            major=one.capability[0],
            minor=one.capability[1],
            uuid=one.uuid,
            multi_processor_count=108,
            is_integrated=int(one.is_unified),
        )

    def opened(value: Callable[[], Any]) -> Callable[..., Any]:
        def told(*_: Any, **__: Any) -> Any:
            card.open()
            return value()

        return told

    def used(device: Any = None) -> int:
        if not card.has_nvml or card.is_mig:
            raise RuntimeError("NVML is not there")
        return int(pynvml.nvmlDeviceGetMemoryInfo(card).used)

    def cap(fraction: float, device: Any = None) -> None:
        card.open()
        card.fraction = fraction

    def reset() -> None:
        allocator.most_reserved_bytes, allocator.most_allocated_bytes = (
            allocator.reserved_bytes,
            allocator.allocated_bytes,
        )

    def stats() -> dict[str, int]:
        return {
            "num_alloc_retries": allocator.num_retries,
            "reserved_bytes.all.peak": allocator.most_reserved_bytes,
            "reserved_bytes.all.current": allocator.reserved_bytes,
            "allocated_bytes.all.peak": allocator.most_allocated_bytes,
            "allocated_bytes.all.current": allocator.allocated_bytes,
        }

    class Stream(_Stream):
        """Libraries write its name in annotations."""

        def __new__(cls, device: Any = None, **_: Any) -> Any:
            return made_stream()

    def made_stream() -> _Stream:
        card.streams.append(_Stream(card))
        return card.streams[-1]

    rng = torch.get_rng_state()

    def when_open(act: Callable[[], None]) -> None:
        if card.is_open:
            act()
        else:
            card._at_opening.append(act)

    patch.setattr("autotune.device_memory.context._opened", None)
    patch.setattr("autotune.device_memory.cap._cap", None)
    functions = {
        "_lazy_init": card.open,
        "_lazy_call": when_open,
        "init": card.open,
        "is_available": lambda: bool(card.visible),
        "is_initialized": lambda: card.is_open,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: len(card.visible),
        "current_device": lambda: card.number,
        "set_device": take,
        "device": lambda device=None: contextlib.nullcontext(),
        "get_device_properties": properties,
        "get_device_name": lambda device=None: properties(device).name,
        "get_device_capability": lambda device=None: (properties(device).major, properties(device).minor),
        "is_bf16_supported": lambda including_emulation=True: including_emulation or card.capability >= (8, 0),
        "synchronize": opened(lambda: card.wait("synchronize")),
        "mem_get_info": opened(lambda: (card.free_bytes, card.total_bytes)),
        "device_memory_used": used,
        "memory_reserved": lambda device=None: allocator.reserved_bytes,
        "memory_allocated": lambda device=None: allocator.allocated_bytes,
        "max_memory_reserved": lambda device=None: allocator.most_reserved_bytes,
        "max_memory_allocated": lambda device=None: allocator.most_allocated_bytes,
        "reset_peak_memory_stats": lambda device=None: reset(),
        "memory_stats": lambda device=None: stats(),
        "empty_cache": allocator.release,
        "set_per_process_memory_fraction": cap,
        "get_per_process_memory_fraction": opened(lambda: card.fraction),
        "set_sync_debug_mode": lambda mode: setattr(card, "warns", mode == "warn"),
        "_sleep": lambda cycles: card.work(cycles / 1e9),
        "get_rng_state": lambda device=None: rng.clone(),
        "set_rng_state": lambda state, device=None: None,
        "get_rng_state_all": lambda: [rng.clone()],
        "set_rng_state_all": lambda states: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "Event": lambda enable_timing=False, **options: _Event(card, enable_timing, **options),
        "Stream": Stream,
        "current_stream": lambda device=None: card.stream,
        "default_stream": lambda device=None: card.streams[0],
        "stream": card.on,
    }
    for name, function in functions.items():
        patch.setattr(torch.cuda, name, function)
    _patch_autocast(patch)
    _patch_distributed(patch)
    make_fake = FakeTensor.__new__

    def on_host(cls: Any, mode: Any, elem: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        return make_fake(cls, mode, elem, _on_host(device), *args, **kwargs)

    patch.setattr(FakeTensor, "__new__", staticmethod(on_host))
    _patch_saved(patch, card)
    _patch_offloaded(patch, card)
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: card.pin(tensor), raising=False)
    patch.setattr(torch.Tensor, "is_pinned", lambda tensor, device=None: card.is_pinned(tensor), raising=False)
    patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: card.record(tensor, stream), raising=False)
    patch.setattr(torch.accelerator, "empty_host_cache", lambda: None)
    patch.setattr(torch.accelerator, "is_available", lambda: True)
    patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    patch.setattr(torch.accelerator, "set_device_index", lambda device: card.take(numbered(device)))
    patch.setattr(torch.accelerator, "current_device_index", lambda: card.number)
    patch.setattr(torch.accelerator, "current_stream", lambda device=None: card.stream)


def _patch_saved(patch: pytest.MonkeyPatch, card: Card) -> None:
    """torch calls hooks of saved tensors within an operation, where no function mode is asked: of this package's that
    ask where a tensor is, these are told."""
    begin = torch.autograd.graph.saved_tensors_hooks.__init__

    def init(self: Any, pack_hook: Callable[[Any], Any], unpack_hook: Callable[[Any], Any]) -> None:
        hooks, module = (pack_hook, unpack_hook), getattr(pack_hook, "__module__", None) or ""
        begin(
            self,
            *(
                map(functools.partial(seen_by, card), hooks)
                if module.startswith("autotune.techniques.support.disk")
                else hooks
            ),
        )

    patch.setattr(torch.autograd.graph.saved_tensors_hooks, "__init__", init)


def _patch_offloaded(patch: pytest.MonkeyPatch, card: Card) -> None:
    """A weight that is offloaded fetches its numbers within an operation, too, and where its gradient is whole."""
    make, asked, computed = (
        getattr(OffloadedWeight, name)
        for name in ("_make_wrapper_subclass", "__torch_function__", "__torch_dispatch__")
    )

    def wrapper(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return make(*args, device=_on_host(device), **kwargs)  # type: ignore[no-any-return]

    def function(func: Any, *args: Any, **kwargs: Any) -> Any:
        return (asked if func in _TOLD else seen_by(card, asked))(func, *args, **kwargs)

    patch.setattr(torch.Tensor, "_make_wrapper_subclass", staticmethod(wrapper))
    patch.setattr(OffloadedWeight, "__torch_function__", staticmethod(function))
    patch.setattr(OffloadedWeight, "__torch_dispatch__", staticmethod(seen_by(card, computed)))
    update = optimizer_step._Update.__call__
    patch.setattr(optimizer_step._Update, "__call__", lambda *given: seen_by(card, update)(*given))


def _patch_autocast(patch: pytest.MonkeyPatch) -> None:
    """It casts as a CPU's does, whose list of operations is another (``Card`` has no kernels of its own)."""
    begin = torch.autocast.__init__

    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        dtype = torch.float16 if device_type == "cuda" and dtype is None else dtype
        begin(self, _host_type(device_type), dtype, *args, **kwargs)

    patch.setattr(torch.autocast, "__init__", init)
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        real = getattr(torch, name)
        patch.setattr(torch, name, lambda *types, real=real: real(*map(_host_type, types)))


def _host_type(device_type: str) -> str:
    return "cpu" if device_type == "cuda" else device_type


def _patch_distributed(patch: pytest.MonkeyPatch) -> None:
    """Its NCCL is gloo: what lies on the card lies in host memory. What DistributedDataParallel gathers gradients in is
    made without the card's knowledge."""
    begin = torch.distributed.init_process_group

    def init(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        begin("gloo" if backend is not None and "nccl" in backend else backend, *args, **kwargs)

    patch.setattr(torch.distributed, "init_process_group", init)
    patch.setattr(torch.distributed, "is_nccl_available", lambda: True)
