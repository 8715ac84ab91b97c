"""``cut``: find what a pruned model keeps, in a process of its own that may hang or fail."""

from __future__ import annotations

import copy
import difflib
import importlib.util
import multiprocessing
import resource
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..errors import Caught, PlanError
from .how import Group, How
from .rebuild import check_whole, tensors_of
from .record import Record
from .surgery import Finder

_T = TypeVar("_T")
_CPU_S = 300
"""Processor seconds after which finding a cut is given up: 40 million parameters took some 30; others had no end."""
_WALL_S = 10 * _CPU_S
"""Seconds, where the processor is others' too."""


def obstacle(model: nn.Module) -> str | None:
    """Why a model cannot be pruned at all, in words; None where nothing is known to stand in the way."""
    if importlib.util.find_spec("torch_pruning") is None:
        return "Torch-Pruning is not installed: pip install torch-pruning"
    if recurrent := sorted({type(m).__name__ for m in model.modules() if isinstance(m, (nn.RNNBase, nn.RNNCellBase))}):
        return f"the model has recurrent layers ({', '.join(recurrent)}), whose gates would be cut in the wrong places"
    kinds = (nn.Linear, _ConvNd)
    if not any(isinstance(m, kinds) or type(m).__name__ == "Conv1D" for m in model.modules()):
        return "the model has neither linear layers nor convolutions"
    return None


def cut(model: nn.Module, run: Callable[[nn.Module], Any] | None, how: How) -> Record:
    """Find what is kept of a model. The model itself is not touched.

    Args:
        model: wherever it is.
        run: its forward and loss on a few samples, on the device of the model that it is given.
        how: what is asked.

    Returns:
        A record, by which :func:`rebuild` cuts the model.

    Raises:
        PlanError: the model cannot be pruned so; the message says why.
    """
    (found,) = cut_each(model, run, [how])
    if isinstance(found, PlanError):
        raise found
    if found.left:
        warnings.warn(f"pruning: {'; '.join(found.left)}.", stacklevel=2)
    return found


def cut_each(model: nn.Module, run: Callable[[nn.Module], Any] | None, hows: Sequence[How]) -> list[Record | PlanError]:
    """As :func:`cut`, in several ways; the model is looked at once.

    Returns:
        In the order of ``hows``, a record or why there is none.

    Raises:
        PlanError: the model cannot be pruned at all.
    """
    untouchable = [{*untouchable_modules(model, how.untouchable, "settings.pruning.untouchable")} for how in hows]
    kept = [frozenset(name for name, one in model.named_modules() if one in modules) for modules in untouchable]

    def find(finder: Finder) -> list[Record | PlanError]:
        return [*map(finder.tried, hows, kept)]

    return _found(model, run, find)


def groups(model: nn.Module, run: Callable[[nn.Module], Any] | None) -> tuple[Group, ...]:
    """Groups of layers that can be cut by ratios of their own, as far as is known before they are.

    Args:
        model: wherever it is; it is left alone.
        run: see :func:`cut`.

    Raises:
        PlanError: the model cannot be pruned at all.
    """
    return _found(model, run, Finder.groups)


def _found(model: nn.Module, run: Callable[[nn.Module], Any] | None, find: Callable[[Finder], _T]) -> _T:
    """What is found of a model that is looked at in a child."""
    check_whole(model)
    if (reason := obstacle(model)) is not None:
        raise PlanError(f"settings.pruning: {reason}. Use kind: none.")
    if run is None:
        raise PlanError(
            "settings.pruning: a cut is found by running the model, and there is no sample to run it on: an iterable "
            "dataset is read only once. Pass run= to apply_to_model, give a map-style dataset, or use kind: none."
        )
    known = run
    if away := [tensor for tensor in tensors_of(model).values() if tensor.device.type != "cpu"]:
        model = copy.deepcopy(model, {id(tensor): _on_host(tensor) for tensor in away})  # a fork has no CUDA
    trains = not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # a fork's backward would want it
    return _in_a_child(lambda: find(Finder(model, known, trains)))


def _on_host(tensor: Tensor) -> Tensor:
    """A copy as ``deepcopy`` makes it, straight to the host: the device may not have room for another."""
    copied = tensor.detach().cpu()
    return type(tensor)(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


def untouchable_modules(model: nn.Module, paths: Iterable[str], where: str) -> Iterator[nn.Module]:
    """These modules, and those in them.

    Args:
        model: that has them.
        paths: of modules.
        where: in a plan they are named.

    Raises:
        PlanError: there is no such module.
    """
    known = dict(model.named_modules())
    for path in paths:
        if path not in known:
            near = difflib.get_close_matches(path, known, cutoff=0.4) or [name for name in known if name][:5]
            raise PlanError(
                f"{where}: the model has no module {path}. Use paths of model.named_modules(), such as "
                f"{', '.join(near)}."
            )
        yield from known[path].modules()


def _in_a_child(find: Callable[[], _T]) -> _T:
    """A forked one: models and losses are seldom pickled, and what it imports and takes is not this process's."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(find, theirs), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads at a fork: the child starts none
        child.start()
    theirs.close()
    said: tuple[str, _T] | None = None
    try:
        if ours.poll(_WALL_S):
            said = ours.recv()
    except EOFError:
        pass
    finally:
        child.kill() if said is None and child.is_alive() and not ours.poll(0) else None
        child.join()
        ours.close()
    if said is None:
        raise PlanError(
            f"settings.pruning: finding a cut was given up (exit code {child.exitcode}): it takes seconds where it "
            f"ends, and is ended after {_CPU_S} s of processor time. Name the modules that tie everything together "
            "in untouchable, such as attention, or use kind: none."
        )
    error, found = said
    if error:
        raise PlanError(error)
    return found


def _answer(find: Callable[[], Any], pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    torch.set_num_threads(1)  # the parent's other threads are not here
    with Caught() as raised:
        pipe.send(("", find()))
    if isinstance(error := raised.error, PlanError):
        pipe.send((str(error), None))
    elif error is not None:  # the user's own code, which fails without pruning too
        pipe.send((f"settings.pruning: the model failed as it was run: {type(error).__name__}: {error}.", None))
