"""Hooks that observe a script: module calls, backward passes, optimizer steps, iterated loaders."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from ..errors import AutotuneError
from ..randomness import undisturbed
from ..ranks import this_rank
from ..training.launched import launcher, set_launcher
from .applied import InScript, refuse
from .observer import Observer
from .shards import unwrapped

__all__ = ["ScriptHooks"]


class ScriptHooks:
    """Applies a plan when the script first uses each object, and checks the first optimizer step against the plan.

    Torch's own classes are patched while nothing is found yet: module calls until the model is known. What stays are a
    counter of backward passes, and a look at each optimizer step.
    """

    def __init__(self, plan: InScript) -> None:
        self._plan = plan
        self.observer: Observer | None = None
        """Observe a script for a trial."""
        self.stepped: Callable[[torch.optim.Optimizer, int], None] | None = None
        """Told of each optimizer step, and of how many backward passes, in place of the observer."""
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._named: tuple[Any, Any, Any] = (None, None, None)
        self._taken_off: list[Callable[[], None]] = []
        self._stops_looking: Callable[[], None] = lambda: None
        self._open = ExitStack()
        self._depth = self._num_backwards = 0
        self._sizes: tuple[int, ...] = ()
        self._is_applying = self._is_checked = self._has_stepped = False

    def install(self) -> None:
        """Install the hooks."""
        set_launcher(self)
        patched = functools.partial(_patched, self._taken_off)
        patched(torch.optim.Optimizer, "__init__", self._note_optimizer)
        patched(DataLoader, "__iter__", self._before_epoch)
        patched(torch.Tensor, "backward", self._around_backward)  # before the modes that it would be told to
        patched(torch.autograd, "backward", self._around_backward)
        for module in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
            patched(module, "start_processes", self._before_processes)
        self._taken_off += [
            register_optimizer_step_pre_hook(self._before_step).remove,
            register_optimizer_step_post_hook(self._after_step).remove,
        ]
        if self.observer is not None:
            self._taken_off.append(self.observer.install())
        found: list[Callable[[], None]] = []
        _patched(found, nn.Module, "__call__", self._around_call)
        self._stops_looking = found[0]

    def prepare(self, model: Any, optimizer: Any, loader: Any) -> None:
        """Take the model, optimizer and loader that the plan is for."""
        self._named = (model, optimizer, loader)

    def stand_aside(self) -> None:
        """Do nothing more: the script applies its plan itself."""
        if self._is_applying:
            return
        if self.observer is not None:
            refuse("the script applies a plan itself. Search for one with the script as it is without.")
        if self._plan.model is not None or self._has_stepped:
            refuse("the script applies a plan itself, and too late. Apply it before the model is first trained.")
        self.remove()

    def remove(self) -> None:
        """Remove the hooks; the plan stays in force."""
        set_launcher(None)
        self._stops_looking()
        for take_off in reversed(self._taken_off):
            take_off()

    def tell_end(self) -> None:
        """The script has come to its end: say so if it never trained here."""
        if launcher() is self and not self._has_stepped and this_rank().rank == 0:
            print(f"autotune: {self._plan.describe_unused()}", file=sys.stderr, flush=True)

    def _note_optimizer(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._optimizers.append(weakref.ref(optimizer))

    def _before_processes(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._plan.model is None and not self._has_stepped:
            refuse(
                "the script starts its processes itself (torch.multiprocessing.spawn), where no plan can be put in "
                "force. Have torchrun start them: `torchrun --nproc-per-node 2 train.py`."
            )
        return original(*args, **kwargs)

    def _before_epoch(self, original: Any, loader: Any) -> Any:
        named = self._named[2]
        is_training = loader is named if named is not None else torch.is_grad_enabled()
        if is_training and not self._is_applying and loader not in self._plan.loaders:
            self._apply(lambda: self._plan.put_on_loader(loader))
        iterator = original(loader)
        if is_training and self.observer is not None:
            self.observer.epoch(iterator)
        return iterator

    def _around_call(self, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_applying and torch.is_grad_enabled() and self._is_model(module):
            self._stops_looking()
            if self.observer is None:
                self._plan.check_ranks()
            self._apply(lambda: self._plan.put_on_model(module, functools.partial(_call, args, kwargs)))
            self._enclose(module)
            return module(*args, **kwargs)
        self._note_evaluation(module)
        return original(module, *args, **kwargs)

    def _note_evaluation(self, module: Any) -> None:
        if self.observer is not None and not module.training and not torch.is_grad_enabled():
            self.observer.evaluated()

    def _is_model(self, module: Any) -> bool:
        """Whether it holds all that an optimizer steps; one that does not is another, or a part."""
        model, optimizer, _ = self._named
        if model is not None and unwrapped(module) is not unwrapped(model):  # either may be a wrapper's
            return False
        held = {id(p) for p in module.parameters() if p.requires_grad}
        known = (
            [optimizer] if optimizer is not None else [one for ref in self._optimizers if (one := ref()) is not None]
        )
        mine = [one for one in known if held and held & _parameters(one)]
        if len(mine) > 1:
            refuse(
                f"{len(mine)} optimizers have parameters of the same model, and a plan is for one. Name that one: "
                "`autotune.prepare(model, optimizer, loader)`."
            )
        if not mine or not _parameters(mine[0]) <= {id(p) for p in module.parameters()}:
            return False
        self._plan.optimizer = mine[0]
        return True

    def _enclose(self, model: Any) -> None:
        """Have each call of the model open the plan's contexts. They stay open for the loss, until its backward pass; a
        call that records no graph closes them itself.

        By the attribute by which torch calls a compiled module: a copy of the model does not have it.
        """
        settings, device = self._plan.plan.settings, next(p.device.type for p in model.parameters())
        inner = model._compiled_call_impl or model._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return inner(*args, **kwargs)
            self._note_evaluation(model)
            self._open.close()
            self._note_inputs((args, kwargs))
            self._depth += 1
            try:
                self._open.enter_context(settings.forward_context(device))
                return inner(*args, **kwargs)
            except BaseException:
                self._open.close()
                raise
            finally:
                self._depth -= 1
                if not torch.is_grad_enabled():
                    self._open.close()
                elif self.observer is not None:
                    self.observer.forward_ended()

        vars(model)["_compiled_call_impl"] = call  # not through setattr: a wrapper of torch.compile's hands that on

    def _note_inputs(self, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if self.observer is not None:
            self.observer.forward(inputs)
        if not self._has_stepped:
            leaves = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim())
            self._sizes = tuple(size for leaf in leaves for size in leaf.shape[:2])

    def _around_backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._depth:
            return original(*args, **kwargs)
        self._open.close()
        self._num_backwards += 1
        if self.observer is not None:
            self.observer.backward(args[0] if args else None)
        self._depth += 1
        try:
            return original(*args, **kwargs)
        finally:
            self._depth -= 1

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._open.close()
        mine = self._named[1] or self._plan.optimizer
        if mine is not None and optimizer is not mine:
            if self._named[1] is None:
                refuse(
                    "the script steps several optimizers, and a plan is for one model and its optimizer. Name them: "
                    "`autotune.prepare(model, optimizer, loader)`."
                )
            return None
        if self._has_stepped:
            return None
        check = functools.partial(self._check_step, optimizer)
        if len(args) > 1 and args[1] is not None:
            return (args[0], _then(args[1], check), *args[2:]), kwargs
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": _then(kwargs["closure"], check)}
        check()
        return None

    def _check_step(self, optimizer: Any) -> None:
        """Once the first gradients are there: after a closure, where the step is given one (Lightning's is)."""
        if self._is_checked:
            return
        self._is_checked = True
        self._plan.check_step(self._num_backwards, self._sizes)
        self._plan.tell_drift()
        self._plan.optimizer = optimizer

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        num_backwards, self._num_backwards = self._num_backwards, 0
        if optimizer is not (self._named[1] or self._plan.optimizer):
            return
        if not self._has_stepped:
            self._has_stepped = True
            self._stops_looking()
            if self.observer is None and this_rank().rank == 0:
                print(f"autotune: {self._plan.describe()}", file=sys.stderr, flush=True)
        if self.observer is not None:
            (self.stepped or self.observer.stepped)(optimizer, num_backwards)

    def _apply(self, act: Callable[[], None]) -> None:
        self._is_applying = True
        try:
            with undisturbed():
                act()
        except AutotuneError as error:
            refuse(str(error))
        finally:
            self._is_applying = False


def _call(args: Any, kwargs: Any, model: nn.Module) -> Any:
    return model(*args, **kwargs)


def _then(closure: Callable[[], Any], act: Callable[[], None]) -> Callable[[], Any]:
    def answer() -> Any:
        found = closure()
        act()
        return found

    return answer


def _parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    """The parameters that it steps: those that take gradients."""
    return {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}


def _patched(taken_off: list[Callable[[], None]], owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function by ``around(original, *args)``, until the replacement is removed."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def answer(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, answer)

    def take_off() -> None:
        if getattr(owner, name) is answer:
            setattr(owner, name, original)

    taken_off.append(take_off)
