"""Hooks that observe a script: module calls, backward passes, optimizer steps, iterated loaders."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from ...device_memory import cap
from ...errors import AutotuneError
from ...internals import lost
from ...randomness import undisturbed
from ...training.apply_pieces import hold_to_budget
from ...training.launched import set_launcher
from ..arrivals import when_imported
from ..observer import Observer
from ..refusal import refuse, say, tell_once
from ..shards import unwrapped
from .applied import InScript
from .contexts import Contexts, is_traced
from .optimizers import FEW_STEPS, Optimizers, parameters_of
from .patches import patch

_MOST_PASSES = 100
"""Backward passes after which there is an optimizer, if a script trains by one."""
_CHECKPOINTS = {
    "safetensors.torch": (("serialize_file",), ("load_file",)),
    "torch.distributed.checkpoint": (("save", "async_save"), ("load",)),
}
"""Modules beside torch's own: what saves in them, and what loads."""
_OF_TORCH = "Have one of these change the parameters: a class of your own may inherit torch.optim.Optimizer."


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
        self._optimizers = Optimizers()
        self._rivals: list[torch.optim.Optimizer] = []
        """Of the same model, until a trial has seen which of them step."""
        self._named: tuple[Any, Any, Any] = (None, None, None)
        self._taken_off: list[Callable[[], None]] = []
        self._stops_looking: Callable[[], None] = lambda: None
        self._stops_listening: Callable[[], None] = lambda: None
        self._contexts = Contexts(plan.plan.settings, self._call_begins, self._call_ended)
        self._parts: weakref.WeakSet[Any] = weakref.WeakSet()
        """Of a model that is called in parts, those that were."""
        self._num_backwards = 0
        self._num_passes = self._num_of_others = 0
        """Backward passes that the next step is of, once that is known; those before another optimizer's step."""
        self._sizes: tuple[int, ...] = ()
        self._is_applying = self._is_checked = self._is_in_pass = False
        self._is_in_train_mode = self._trains_in_train_mode = False
        """Whether the model was, as it was last called to train; as a step was taken."""
        self.has_stepped = self.stands_aside = False

    def install(self) -> None:
        """Install the hooks."""
        if (reason := lost("scripts")) is not None:
            refuse(f"{reason}, and no plan can be put on a script without it. Use the version that was tried.")
        set_launcher(self)
        self._taken_off += [
            patch(torch.optim.Optimizer, "__init__", self._note_optimizer),
            patch(DataLoader, "__iter__", self._before_epoch),
            patch(torch.Tensor, "backward", self._around_backward),  # before the modes that it would be told to
            patch(torch.autograd, "backward", self._around_backward),
            patch(torch.multiprocessing, "start_processes", self._before_processes),
            patch(sys.modules["torch.multiprocessing.spawn"], "start_processes", self._before_processes),
            register_optimizer_step_pre_hook(self._before_step).remove,
            register_optimizer_step_post_hook(self._after_step).remove,
        ]
        if self.observer is not None:
            self._taken_off += [
                self.observer.install(),
                patch(torch, "save", self._around_save),
                patch(torch, "load", self._around_load),
            ]
            for module in _CHECKPOINTS:
                when_imported(module, functools.partial(self._watch_checkpoints, module))
        self._stops_listening = patch(torch.autocast, "__enter__", self._note_autocast)
        self._look()

    def _watch_checkpoints(self, module: str) -> None:
        found, (saves, loads) = sys.modules[module], _CHECKPOINTS[module]
        for names, around in ((saves, self._around_save), (loads, self._around_load)):
            self._taken_off += [patch(found, name, around) for name in names if hasattr(found, name)]

    def _around_save(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self.observer is None or self._is_applying:
            return original(*args, **kwargs)
        return self.observer.saves(functools.partial(original, *args, **kwargs))

    def _around_load(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self.observer is not None and not self._is_applying and not self.has_stepped:
            self.observer.loads(kwargs.get("checkpoint_id", args[0] if args else None))
        return original(*args, **kwargs)

    def _look(self) -> None:
        """Wait for the model to be called."""
        self._stops_looking = patch(nn.Module, "__call__", self._around_call)

    def why_no_step(self) -> str:
        """Of a script that came to its end without an optimizer step: what else it did."""
        if self._num_backwards and not self._optimizers:
            passes = f"{self._num_backwards} backward pass{'es' if self._num_backwards > 1 else ''}"
            return f"It made {passes} and built no torch.optim.Optimizer. {_OF_TORCH}"
        return "If it trains in processes that it starts itself, have torchrun start them."

    def prepare(self, model: Any, optimizer: Any, loader: Any) -> None:
        """Take the model, optimizer and loader that the plan is for."""
        self._named = (model, optimizer, loader)

    def stand_aside(self) -> None:
        """Do nothing more: the script applies its plan itself."""
        if self._is_applying:
            return
        if self.observer is not None:
            refuse("the script applies a plan itself. Search for one with the script as it is without.")
        if self.has_stepped:
            tell_once("the script applies a plan itself, after steps with this one, of which no more is put on.")
        elif self._plan.model is not None:
            refuse("the script applies a plan itself, and too late. Apply it before the model is first trained.")
        self.stands_aside = True
        self.remove()

    def remove(self) -> None:
        """Remove the hooks; the plan stays applied."""
        set_launcher(None)
        self._stops_looking()
        self._stops_listening()
        for take_off in reversed(self._taken_off):
            take_off()

    def _note_optimizer(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._optimizers.add(optimizer)
        if self.has_stepped and self._named[1] is None:  # of a next stage, or of a next model
            self._stops_looking()
            self._look()

    def _before_processes(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._plan.model is None and not self.has_stepped:
            refuse(
                "the script starts its processes itself (torch.multiprocessing.spawn), where no plan can be "
                "applied. Have torchrun start them: `torchrun --nproc-per-node 2 train.py`."
            )
        return original(*args, **kwargs)

    def _before_epoch(self, original: Any, loader: Any) -> Any:
        named = self._named[2]
        is_training = loader is named if named is not None else torch.is_grad_enabled()
        if is_training and not self._is_applying and not self.has_stepped:
            self._apply(lambda: self._plan.train_on(loader))
        if is_training and not self._is_applying:
            put = functools.partial(self._apply, what="a DataLoader that was made later")
            self._plan.data.begin_epoch(loader, put, is_named=named is not None)
        else:
            self._plan.data.go_on(loader)
        if is_training and self.observer is not None:
            self.observer.epoch_begins(loader)
        iterator = self._plan.data.begin(loader, original)
        if is_training and self.observer is not None:
            self.observer.epoch(iterator, loader)
        return iterator

    def _around_call(self, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        if is_traced():
            return original(module, *args, **kwargs)
        if not self._is_applying and torch.is_grad_enabled():
            looks = self._plan.model is None or self.has_stepped
            if looks and (optimizer := self._optimizer_of(module)) is not None:
                self._stops_looking()
                if self._plan.model is None and self.observer is None:  # a trial is held from its first use of CUDA
                    hold_to_budget(self._plan.plan, repeats=False)
                cap.step_begins()
                self._put_on(module, optimizer, functools.partial(_call, args, kwargs))
                return module(*args, **kwargs)
            if module not in self._parts and self._is_part(module):
                self._parts.add(module)
                self._enclose(module)
                return original(module, *args, **kwargs)
        self._note_evaluation(module)
        return original(module, *args, **kwargs)

    def _put_on(self, module: Any, optimizer: Any, run: Callable[[Any], Any]) -> None:
        """The plan on the model and its optimizer; later ones are left alone where that cannot be."""
        plan = self._plan
        known, plan.optimizer = plan.optimizer, optimizer
        if module is plan.model:
            is_applied = self._apply(plan.put_on_optimizer, "an optimizer that was built later")
        else:
            if self.observer is None and not self.has_stepped:
                plan.check_ranks()
            is_applied = self._apply(lambda: plan.put_on_model(module, run), "a model that is trained later")
            if is_applied:
                self._enclose(module)
        plan.optimizer = optimizer if is_applied else known

    def _is_part(self, module: Any) -> bool:
        """Whether it is of the model that the script names, which calls its parts one by one, and is one of these."""
        model = self._named[0]
        if model is None or self._contexts.is_within or all(module is not one for one in model.modules()):
            return False
        if self._plan.model is None and (optimizer := self._optimizer_of(model)) is not None:
            self._plan.is_in_parts, self._plan.optimizer = True, optimizer
            self._apply(lambda: self._plan.put_on_model(model, None))
        return self._plan.model is model

    def _note_autocast(self, original: Any, context: Any) -> Any:
        """Around the model's call or within it."""
        is_forward = torch.is_grad_enabled() and self._contexts.is_in_forward
        is_handed_on = threading.current_thread() is not threading.main_thread()  # by DataParallel
        if context._enabled and is_forward and not self._is_applying and not is_handed_on:
            self._plan.own_autocast.add(context.device)
        return original(context)

    def _note_evaluation(self, module: Any, inputs: Any = None) -> bool:
        """Whether it is one: in eval mode, and without gradients, unless the model is trained in train mode."""
        evaluates = not module.training and (self._trains_in_train_mode or not torch.is_grad_enabled())
        if evaluates and self.observer is not None:
            self.observer.evaluated(inputs)
        return evaluates

    def _optimizer_of(self, module: Any) -> torch.optim.Optimizer | None:
        """That whose parameters a module holds all of; None where it is another, or a part."""
        model, optimizer, _ = self._named
        if model is not None and unwrapped(module) is not unwrapped(model):  # either may be a wrapper's
            return None
        mine = self._optimizers.of({id(p) for p in module.parameters() if p.requires_grad})
        mine = [one for one in mine if optimizer in (None, one)]
        mine = mine[-1:] if self.has_stepped else mine
        if len(mine) > 1:
            self._rivals = mine
            if self.observer is None or self._optimizers.num_steps >= FEW_STEPS:
                refuse(self._optimizers.of_one_model(mine))
            return None  # until it is seen which of them step
        if not mine or not parameters_of(mine[0]) <= {id(p) for p in module.parameters()}:
            return None
        return mine[0]

    def _enclose(self, module: Any) -> None:
        self._contexts.enclose(module, list(self._plan.model.parameters()))

    def _call_begins(self, module: Any, inputs: Any) -> None:
        if not self._note_evaluation(module, inputs):
            self._is_in_train_mode = module.training
            self._note_inputs(inputs)

    def _call_ended(self, outputs: Any) -> None:
        if self.observer is not None:
            self.observer.forward_ended(outputs)

    def _note_inputs(self, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        cap.batch_comes(inputs)
        if self.observer is not None and not (self._plan.is_in_parts and self._is_in_pass):
            self.observer.forward(inputs)
        self._is_in_pass = True
        if not self.has_stepped:
            leaves = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim())
            self._sizes = tuple(size for leaf in leaves for size in leaf.shape[:2])

    def _around_backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._contexts.is_within:
            return original(*args, **kwargs)
        self._contexts.close()
        self._num_backwards += 1
        self._is_in_pass = False
        if self._num_backwards == _MOST_PASSES and not self._optimizers and not self.has_stepped:
            refuse(
                f"the script has made {_MOST_PASSES} backward passes and built no torch.optim.Optimizer, by whose "
                f"steps it would be seen to train. {_OF_TORCH}"
            )
        if self.observer is not None:
            self.observer.backward(args[0] if args else None)
        with self._contexts.in_backward(), self._plan.passing_back(args[0] if args else None):
            return original(*args, **kwargs)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._contexts.close()
        self._optimizers.stepped(optimizer)
        mine = self._named[1] or self._plan.optimizer
        if self._rivals:
            return None
        if mine is not None and optimizer is not mine:
            self._note_other_step(optimizer, mine)
            return None
        if self.has_stepped and self.observer is None:
            return None
        check = functools.partial(self._check_step, optimizer)
        if len(args) > 1 and args[1] is not None:
            return (args[0], _then(args[1], check), *args[2:]), kwargs
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": _then(kwargs["closure"], check)}
        check()
        return None

    def _note_other_step(self, optimizer: torch.optim.Optimizer, mine: torch.optim.Optimizer) -> None:
        """A script is refused, soon; a job that has stepped goes on."""
        is_named = self._named[1] is not None
        if self.has_stepped and (self.observer is None or self.observer.num_steps > FEW_STEPS):
            if not is_named:
                tell_once(f"the script steps another optimizer too ({type(optimizer).__name__}), which is left alone.")
        elif (reason := self._optimizers.why_not(mine, optimizer, is_named)) is not None:
            refuse(reason)

    def _check_step(self, optimizer: Any) -> None:
        """Once a step's first gradients are there: after a closure, where the step is given one (Lightning's is; LBFGS
        calls it again)."""
        self._num_passes = self._num_passes or self._num_backwards or self._num_of_others
        if self._is_checked:
            return
        self._is_checked = True
        self._plan.check_step(self._num_passes, self._sizes)
        self._plan.tell_drift()
        self._plan.optimizer = optimizer

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        num_passes = self._num_passes or self._num_backwards or self._num_of_others
        self._num_backwards = self._num_passes = self._num_of_others = 0
        if self._rivals or optimizer is not (self._named[1] or self._plan.optimizer):
            self._num_of_others = num_passes
            return
        cap.step_ended()
        self._trains_in_train_mode = self._is_in_train_mode
        if not self.has_stepped:
            self.has_stepped = True
            self._stops_looking()
            self._stops_listening()
            if self.observer is None:
                self._plan.loader = None
                say(self._plan.describe())
        if self.observer is not None:
            (self.stepped or self.observer.stepped)(optimizer, num_passes)

    def _apply(self, act: Callable[[], None], what: str = "") -> bool:
        """Apply a part of the plan. Where that cannot be, the script ends; after its first step it goes on, with
        ``what`` as it is."""
        self._is_applying = True
        try:
            with undisturbed():
                act()
        except AutotuneError as error:
            if not what or not self.has_stepped:
                refuse(str(error))
            tell_once(f"{what} is left as the script has it: {error}")
            return False
        finally:
            self._is_applying = False
        return True


def _call(args: Any, kwargs: Any, model: nn.Module) -> Any:
    return model(*args, **kwargs)


def _then(closure: Callable[[], Any], act: Callable[[], None]) -> Callable[[], Any]:
    def answer() -> Any:
        found = closure()
        act()
        return found

    return answer
