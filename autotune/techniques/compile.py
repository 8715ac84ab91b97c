"""Compile: the model, or each of its repeated blocks, as one program of fused kernels."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from pydantic import Field, model_validator

from ..errors import PlanError
from ..units import MIB
from .support.base import Effect, FileKind, Program, Run, Stage, Technique
from .support.facts import Facts, ScriptFacts
from .support.recomputed import is_recomputed

if TYPE_CHECKING:
    import torch
    from torch import nn

    from . import Settings

_INDUCTOR_BYTES = 113 * MIB
"""What torch's inductor adds to a process on a CPU: for a GPT of six blocks, torch 2.13."""


class Compile(Technique):
    """``torch.compile``, by inductor, in place.

    What was compiled lies in torch's cache on disk (``TORCHINDUCTOR_CACHE_DIR``), so that later processes on the
    machine, trials and jobs alike, start in a fraction of the time.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.compile;
    https://docs.pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html;
    https://pytorch.org/blog/activation-checkpointing-techniques/
    """

    name: ClassVar[str] = "compile"
    goes_by: ClassVar[str | None] = "compiled modules"
    stage: ClassVar[Stage] = Stage.COMPILE
    affects: ClassVar[frozenset[Effect]] = frozenset({"tensors", "code"})
    rewrites: ClassVar[bool] = True
    purposes: ClassVar[Mapping[str, str]] = {
        "blocks": "Compiles each repeated block by itself: blocks that are alike share one program.",
        "model": "Compiles the whole model into one program of fused kernels.",
    }

    kind: Literal["none", "blocks", "model"] = "none"
    """``none`` runs operation by operation, as stock; ``blocks`` compiles each repeated block by itself, ``model`` all
    at once."""
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """torch's: ``reduce-overhead`` records a program's kernels as CUDA graphs, so that launching them takes no time;
    ``max-autotune`` tries several kernels for a product and takes the fastest, and on CUDA records them too."""
    activation_memory_budget: float = Field(default=1.0, ge=0, le=1)
    """How much of what a compiled program keeps for backward it may keep: 1 is all that makes it fast, 0 recomputes
    everything from the program's inputs."""

    @model_validator(mode="after")
    def _check_kind(self) -> Compile:
        stock = type(self).model_fields
        for name, value in (("mode", self.mode), ("activation_memory_budget", self.activation_memory_budget)):
            if self.kind == "none" and value != stock[name].default:
                raise ValueError(
                    f"{name}: kind none compiles nothing, but got {value}. Use kind: blocks or kind: model."
                )
        return self

    def describe(self, facts: Facts | None = None) -> str:
        """What is compiled, and what it may keep."""
        if self.kind == "none":
            return super().describe(facts)
        what = "each block" if self.kind == "blocks" else "the model"
        mode = "" if self.mode == "default" else f" ({self.mode})"
        budget = self.activation_memory_budget
        return f"compile {what}{mode}" + (f", keeping {budget:.0%} of its activations" if budget < 1 else "")

    @classmethod
    def facts_of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, device_type: str) -> Mapping[str, Any]:
        """Whether there is a compiler."""
        return {"no_compiler": lacking_compiler(device_type)}

    @classmethod
    def choices(cls, facts: Facts) -> tuple[Compile, ...]:
        """On CUDA: none; each block and the model, in every mode, graphs first where a pass sees few samples: its
        kernels are short, and launching them is what takes the time. On a CPU none, where training gained nothing,
        and in inference the model: it fuses what rounds the inputs of integer products."""
        if facts.device.type == "cpu":
            model = cls(kind="model")
            return (cls(), model) if facts.inference and model.unavailable(facts) is None else (cls(),)
        modes = ["default", "reduce-overhead", "max-autotune"]
        if (facts.micro_batch or facts.effective_batch) <= _FEW_SAMPLES:
            modes = ["reduce-overhead", "default", "max-autotune"]
        offered = (cls.model_validate({"kind": kind, "mode": mode}) for mode in modes for kind in ("blocks", "model"))
        return (cls(), *(one for one in offered if one.unavailable(facts) is None))

    def prior_gain(self) -> tuple[float, float]:
        """A tenth, and not much is known: a prototype gained nothing on a CPU; on an H200 compiled blocks took a
        LLaMA 0.77 of the step, a small GPT 1.6 (docs/more/cards.md)."""
        return (0.0, 0.0) if self.kind == "none" else (0.1, 0.3)

    def unavailable(self, facts: Facts) -> str | None:
        """It takes a compiler, blocks where blocks are to be compiled, and CUDA for its graphs."""
        if self.kind == "none":
            return None
        if self.mode == "reduce-overhead" and facts.device.type != "cuda":
            return "mode reduce-overhead records CUDA graphs, and there are none on a CPU"
        if self.kind == "blocks" and facts.num_blocks == 0:
            return "the model has no blocks"
        return facts.no_compiler

    def options_of(self, program: Program) -> Mapping[str, Any]:
        """nanoGPT compiles unless it is told not to; a Trainer is not to compile what is compiled."""
        if program == "nanoGPT":
            return {"compile": self.kind != "none"}
        return {"torch_compile": False} if self.kind != "none" and program == "Trainer" else {}

    @classmethod
    def left_to(cls, script: ScriptFacts) -> str | None:
        """It is of the whole model, or of blocks that the model calls."""
        in_parts = "the script calls the parts of its model one by one" if script.in_parts else None
        return super().left_to(script) or in_parts

    def not_in_file(self, kind: FileKind) -> str | None:
        """It has no kernels."""
        return "a file has operations, and no kernels that were compiled of them"

    def conflicts(self, settings: Settings) -> str | None:
        """What it would trace into, or would leave out without a word."""
        if self.kind == "none":
            return None
        if settings.layers.kind != "none":
            return "a compiled program keeps what it chooses, and memory-saving layers would not be applied: use one"
        if self.mode in _RECORDING and settings.batch is not None and settings.batch.accumulate > 1:
            return (
                f"mode {self.mode} records CUDA graphs on a card, which overwrite gradients that a later micro-batch "
                "would be added to: use mode default or max-autotune-no-cudagraphs, or no accumulation"
            )
        return None

    @property
    def lends_gradients(self) -> bool:
        """CUDA graphs do (``dealloc_current_path_weakrefs`` of torch 2.13, torch/_inductor/cudagraph_trees.py)."""
        return self.mode in _RECORDING

    def as_predicted(self, facts: Facts) -> Compile:
        """What a program keeps is its compiler's choice: it is predicted as if nothing was compiled."""
        return Compile()

    def cached_bytes(self, facts: Facts) -> int:
        """The compiler's own memory, which stays in the process."""
        return _INDUCTOR_BYTES if self.kind != "none" and facts.device.type == "cpu" else 0

    def may_hold(self, step_bytes: int, facts: Facts) -> int:
        """At most all of it once more: CUDA graphs run in a pool of memory that they share with each other and with
        nothing else, and that is kept ("the private pool", torch 2.13, torch/_inductor/cudagraph_trees.py)."""
        return step_bytes if self.mode in _RECORDING and facts.device.type == "cuda" else 0

    def undo(self, model: nn.Module) -> nn.Module:
        """A model that runs operation by operation, where it was compiled here; what the user compiled stays so."""
        for module in model.modules():
            if vars(module).pop(_MARK, False):
                module._compiled_call_impl = None
        return model

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """Have the modules compiled in place as they are first called; parameters, hooks and ``state_dict`` keys stay.
        A copy of the model is not compiled, as torch has it.

        Raises:
            PlanError: there are no blocks, or there is nothing to compile with.
        """
        if self.kind == "none":
            return model
        if self.kind == "blocks" and not blocks:
            raise PlanError("settings.compile.kind: the model has no blocks to compile. Use kind: model, or none.")
        from torch._inductor import list_mode_options

        device = next((p.device.type for p in model.parameters()), "cpu")
        if (reason := lacking_compiler(device)) is not None:
            raise PlanError(f"settings.compile.kind: {reason}. Use kind: none here.")
        if self.mode == "reduce-overhead" and device != "cuda":
            raise PlanError(
                f"settings.compile.mode: {self.mode} records CUDA graphs, but the model is on a {device}. "
                "Use mode: default here."
            )
        modules, options = blocks if self.kind == "blocks" else (model,), list_mode_options(self.mode)
        plain = {name: value for name, value in options.items() if name != _GRAPHS}
        for module, entry, other in zip(modules, _entries(modules), _entries(modules), strict=True):
            call = self._compiled(entry, plain)
            if self.mode in _RECORDING and device == "cuda":
                call = _recorded(self._compiled(other, options), call)
            module._compiled_call_impl = call
            vars(module)[_MARK] = True
        return model

    def _compiled(self, entry: MethodType, options: Mapping[str, Any]) -> Callable[..., Any]:
        """A module's call as a program. One that recomputes blocks is whole or an error, as torchtitan has it: of one
        in pieces torch would run a recomputed block twice, and what it does to its buffers too."""
        import torch

        own: dict[str, Any] = {"fullgraph": any(map(is_recomputed, cast("nn.Module", entry.__self__).modules()))}
        if self.activation_memory_budget == 1:
            return torch.compile(entry, options=dict(options), **own)
        return torch.compile(entry, backend=_Inductor(self.activation_memory_budget, options), **own)


_FEW_SAMPLES = 8
"""In a forward pass."""
_RECORDING = ("reduce-overhead", "max-autotune")
"""Modes that record CUDA graphs (``torch._inductor.list_mode_options`` in torch 2.13)."""
_GRAPHS = "triton.cudagraphs"
"""inductor's option for it."""
_MARK = "_autotune_compiled"
"""On modules that are compiled by this technique."""


def _entries(modules: Sequence[nn.Module]) -> Iterator[MethodType]:
    """What calls each of them, from a file that is none of torch's: what begins in one of those, as ``nn.Sequential``
    does, torch leaves uncompiled without a word (``nn.Module.compile`` in torch 2.13).

    torch keeps up to eight programs for each piece of Python code, and runs the rest uncompiled. So modules have code
    of their own, but for those that are alike, which share a program.
    """
    codes: dict[Any, CodeType] = {}
    for module in modules:
        alike = (
            type(module),
            is_recomputed(module),
            tuple((p.shape, p.dtype, p.requires_grad) for p in module.parameters()),
        )
        code = codes.setdefault(alike, _called.__code__.replace())
        yield MethodType(FunctionType(code, globals()), module)


def _called(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def _recorded(recorded: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """What a call of CUDA graphs gives lies in memory that the next one overwrites; torch raises an error where it is
    read then. So numbers are copied out of it, such as a loss that a loop keeps; and what evaluates, and may keep all
    that it is given, runs without graphs."""
    import torch
    from torch.utils._pytree import tree_map_only

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        found = recorded(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda one: one.clone() if one.ndim == 0 else one, found)

    return call


class _Inductor:
    """torch's default backend, with a bound on what a program keeps for backward: torch has it as a setting of the
    whole process, which is read as a program is compiled."""

    def __init__(self, activation_memory_budget: float, options: Mapping[str, Any]) -> None:
        self._budget, self._options = activation_memory_budget, dict(options)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(activation_memory_budget=self._budget):
            return compile_fx(graph, inputs, config_patches=self._options)


def lacking_compiler(device_type: str) -> str | None:
    """Why inductor cannot compile on this machine, in words; None where it can."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None and (device_type == "cpu" or shutil.which("gcc") is None):
        return f"there is no C++ compiler here ({compiler}: apt-get install g++)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python's headers, which programs are compiled with, are not installed (apt-get install python3-dev)"
    if device_type == "cuda" and find_spec("triton") is None:
        return "triton, which compiles for CUDA, is not installed (pip install triton)"
    return None
