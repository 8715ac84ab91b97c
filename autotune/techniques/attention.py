"""Attention: by which of torch's kernels, or of a model's own ways, its products and softmax are computed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..errors import PlanError
from .support.base import Effect, Exactness, FileKind, Run, Stage, Technique
from .support.facts import AttentionBy, Facts

if TYPE_CHECKING:
    import torch
    from torch import nn

    from . import Settings

_BACKENDS = {
    "math": "MATH", "efficient": "EFFICIENT_ATTENTION", "flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION",
}  # fmt: skip
"""Names in ``torch.nn.attention.SDPBackend``."""
_ON_CPU = ("math", "flash")
"""Source: aten/src/ATen/native/transformers/sdp_utils_cpp.cpp, select_sdp_backend_cpp."""
_LEAST_CAPABILITY = {"efficient": (5, 0), "flash": (8, 0), "cudnn": (8, 0)}
"""Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp."""
_OF_TRANSFORMERS: Mapping[str, AttentionBy] = {"eager": "eager", "flex": "flex_attention"}
"""Kinds that only models of transformers have: their ``attn_implementation``."""
_LEAST_OF_TRITON = (7, 0)
"""Source: torch/_inductor/scheduler.py, where it raises ``GPUTooOldForTriton``."""
_REFUSALS = (
    "No available kernel",
    "No viable backend",
    "`sdpa` attention does not support",
    "`flex_attention` does not support",
    "Attention sinks cannot be run on CPU",
    "FlexAttention does not support",
)
"""What an error of torch or transformers begins with where the one kernel that is allowed does not do it."""


class Attention(Technique):
    """By which kernel ``scaled_dot_product_attention`` is computed, in modules that call it; torch chooses by itself.

    Models of transformers that compute attention another way (``eager``) are switched to it.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html
    """

    name: ClassVar[str] = "attention"
    goes_by: ClassVar[str | None] = "attention switches"
    stage: ClassVar[Stage] = Stage.ATTENTION
    affects: ClassVar[frozenset[Effect]] = frozenset({"tensors", "code"})
    only_where_listed: ClassVar[bool] = True
    rewrites: ClassVar[bool] = True
    purposes: ClassVar[Mapping[str, str]] = {
        "default": "Leaves the choice to torch and the model.",
        "math": "Computes attention by separate operations, which keep the weights of all pairs.",
        "efficient": "Computes attention in tiles by the memory-efficient kernel; weights are not kept.",
        "flash": "Computes attention in tiles by the flash kernel; weights are not kept.",
        "cudnn": "Computes attention in tiles by cuDNN's kernel; weights are not kept.",
        "eager": "Computes attention by transformers' own operations, which keep the weights of all pairs.",
        "flex": "Compiles a kernel for the model's own mask; weights are not kept.",
    }

    kind: Literal["default", "math", "efficient", "flash", "cudnn", "eager", "flex"] = "default"
    """``default`` is stock; ``math``, ``efficient``, ``flash`` and ``cudnn`` allow torch this kernel alone; ``eager``
    and ``flex`` are transformers' ``attn_implementation`` ``eager`` and ``flex_attention``."""

    def describe(self, facts: Facts | None = None) -> str:
        """``attention by flash``."""
        return "attention as torch chooses" if self.kind == "default" else f"attention by {self.kind}"

    @classmethod
    def facts_of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, device_type: str) -> Mapping[str, Any]:
        """By what it can be computed."""
        return {"attention": ways(model)}

    @classmethod
    def choices(cls, facts: Facts) -> tuple[Attention, ...]:
        """All that can be had but flash on a CPU, which torch takes there by itself, and what the model does today."""
        own = facts.attention[:1]
        same = {kind for kind, by in _OF_TRANSFORMERS.items() if own == (by,)}
        if own == ("sdpa",) and facts.device.type == "cpu":
            same = {"flash"}
        kinds = (kind for kind in (*_BACKENDS, *_OF_TRANSFORMERS) if kind not in same)
        others = (cls.model_validate({"kind": kind}) for kind in kinds)
        return (cls(), *(one for one in others if one.unavailable(facts) is None))

    def exactness(self, facts: Facts) -> Exactness:
        """Kernels sum in another order, and round between operations or not."""
        return "exact" if self.kind == "default" else "rounding"

    def unavailable(self, facts: Facts) -> str | None:
        """The model must call it, and the device have the kernel."""
        if self.kind == "default":
            return None
        if not facts.attention:
            return "no module of the model is known to call scaled_dot_product_attention, or to be switched to it"
        if self.kind in _OF_TRANSFORMERS:
            if _OF_TRANSFORMERS[self.kind] not in facts.attention:
                return f"only models of transformers have {self.kind} attention, and not all"
            return self._flex_unavailable(facts) if self.kind == "flex" else None
        if "sdpa" not in facts.attention:
            return "transformers' model cannot compute its attention by scaled_dot_product_attention"
        if facts.device.type == "cpu":
            return None if self.kind in _ON_CPU else f"a CPU has the kernels math and flash, and not {self.kind}"
        least = _LEAST_CAPABILITY.get(self.kind, (0, 0))
        if facts.device.capability is not None and facts.device.capability < least:
            return f"{self.kind} needs a card of compute capability {least[0]}.{least[1]}"
        return None

    @staticmethod
    def _flex_unavailable(facts: Facts) -> str | None:
        """Triton's kernel is compiled for a card; a CPU's, of C++, has no backward (``_validate_device`` in
        torch/nn/attention/flex_attention.py)."""
        if facts.device.type == "cpu" and not facts.inference:
            return "torch's flex attention has no backward on a CPU"
        if facts.device.capability is not None and facts.device.capability < _LEAST_OF_TRITON:
            return f"flex needs a card of compute capability {_LEAST_OF_TRITON[0]}.{_LEAST_OF_TRITON[1]}"
        return facts.no_compiler  # known by `compile`

    def conflicts(self, settings: Settings) -> str | None:
        """A compiled program comes to modules by itself."""
        if self.kind in ("default", "eager") or settings.compile.kind == "none":
            return None
        return "a compiled program chooses kernels by itself where it breaks into pieces: use one"

    def not_in_file(self, kind: FileKind) -> str | None:
        """A kernel is chosen where it runs."""
        return "what runs the file chooses the kernel" if self.kind not in ("default", "eager") else None

    def undo(self, model: nn.Module) -> nn.Module:
        """Torch's choice, and the implementation that the model had."""
        for module in model.modules():
            forward = vars(module).get("forward")
            if isinstance(forward, functools.partial) and forward.func is _by_kernel:
                _, own, _ = forward.args
                vars(module).pop("forward") if own is None else vars(module).update(forward=own)
        for one in _of_transformers(model):
            if (own := vars(one).pop(_OWN, None)) is not None:
                one.set_attn_implementation(own)
        return model

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """Switch a model of transformers, and give modules that call ``scaled_dot_product_attention`` a forward within
        ``sdpa_kernel``, which recomputation in backward comes to as well.

        Raises:
            PlanError: no module calls it, or the model cannot be switched.
        """
        if self.kind == "default":
            return model
        by: AttentionBy = _OF_TRANSFORMERS.get(self.kind, "sdpa")
        known = ways(model)
        if by not in known:
            raise PlanError(
                f"settings.attention.kind: {self.kind} needs modules that call scaled_dot_product_attention, or a "
                f"model of transformers that can be switched to {by}, but the model has none. Leave attention out."
            )
        if by != known[0]:
            _switch(model, by)
        for module in model.modules() if by != "eager" else ():
            if _calls_attention(module):
                # As in checkpointing: on the instance. The class's own is looked up late: layers change the class.
                own = vars(module).get("forward")
                made = functools.partial(_by_kernel, module, own, self.kind)
                made.__signature__ = _signature(module.forward)  # type: ignore[attr-defined]
                vars(module)["forward"] = made
        return model


def _by_kernel(module: nn.Module, own: Any, kind: str, /, *args: Any, **kwargs: Any) -> Any:
    """What a module's own forward returns, with one kernel allowed.

    Args:
        module: whose it is.
        own: its instance's; None is its class's.
        kind: of the kernel.
        args: what it is given.
        kwargs: the same by name.

    Raises:
        PlanError: the kernel does not do what the module asks of it.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    allowed = sdpa_kernel(getattr(SDPBackend, _BACKENDS[kind])) if kind in _BACKENDS else nullcontext()
    with _in_words(module, kind), allowed:
        return type(module).forward(module, *args, **kwargs) if own is None else own(*args, **kwargs)


@contextmanager
def _in_words(module: nn.Module, kind: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if not str(error).startswith(_REFUSALS):
            raise
        raise PlanError(
            f"settings.attention.kind: {kind} does not compute the attention of {type(module).__name__}: its mask, "
            "dropout, head size, dtype or softcap is none that this kernel takes, or there is no such kernel here (a "
            "CPU has math and flash, which takes no dropout there; on CUDA flash and cudnn take half precision alone; "
            "flex takes no dropout, and has no backward on a CPU). Use another kernel, or leave attention out."
        ) from error


def ways(model: nn.Module) -> tuple[AttentionBy, ...]:
    """How a model's attention can be computed: as it is today, then what it can be switched to; empty where that is not
    known."""
    switched = _of_transformers(model)
    if switched:
        own = {one.config._attn_implementation for one in switched}
        shows_weights = any(one.config.output_attentions for one in switched)  # which eager alone does
        can_switch = not shows_weights and all(one._can_set_attn_implementation() for one in switched)
        able: dict[AttentionBy, bool] = {
            "sdpa": all(one._supports_sdpa for one in switched),
            "eager": True,
            "flex_attention": all(one._supports_flex_attn for one in switched),
        }
        if len(own) != 1 or not own <= able.keys():
            return ()
        (today,) = own
        return (today, *(by for by, can in able.items() if by != today and can and can_switch))
    return ("sdpa",) if any(_calls_attention(module) for module in model.modules()) else ()


_OWN = "_attention_before_plan"
"""On a model of transformers that was switched: the implementation that it had."""


def _of_transformers(model: nn.Module) -> list[Any]:
    """The models of transformers in a model, outer ones first."""
    import sys

    if "transformers" not in sys.modules:
        return []
    from transformers import PreTrainedModel

    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def _switch(model: nn.Module, by: AttentionBy) -> None:
    """With configurations of its own: a job may build several models of one."""
    import copy

    from transformers import PretrainedConfig

    known: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PretrainedConfig):
                vars(module)[name] = copy.deepcopy(value, known)
    models = _of_transformers(model)
    for one in models:
        vars(one)[_OWN] = one.config._attn_implementation
    inner = {part for one in models for part in one.modules() if part is not one}
    for one in models:
        if one not in inner:
            one.set_attn_implementation(by)


def _signature(forward: Any) -> inspect.Signature:
    """What a forward takes, which a Trainer reads the columns of its dataset from."""
    own = inspect.signature(forward)
    return own.replace(
        parameters=[one.replace(annotation=inspect.Parameter.empty) for one in own.parameters.values()],
        return_annotation=inspect.Signature.empty,
    )


_CALLS = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward", "ALL_ATTENTION_FUNCTIONS"})
"""Names in the code of a forward that comes to it: torch's, and transformers' table of attentions."""
_BASES = ("transformers.modeling_utils", "transformers.integrations", "transformers.generation")
"""Where transformers' models have what switches their attention, and does not compute it."""
_LIBRARIES = ("torch", "transformers")
"""Whose functions are not looked into."""


def _calls_attention(module: nn.Module) -> bool:
    """Whether the code of its class calls it, or a function that the code names."""
    kind: Any = type(module)
    return _is_calling(kind)


@functools.cache
def _is_calling(kind: type) -> bool:
    from torch import nn

    above = kind.__mro__[: kind.__mro__.index(nn.Module)]
    own = [base for base in above if not base.__module__.startswith(_BASES)]
    waiting = [one for base in own for one in vars(base).values() if isinstance(one, FunctionType)]
    seen = {*waiting}
    while waiting:
        function = waiting.pop()
        names = _names_in(function.__code__)
        if names & _CALLS:
            return True
        for value in map(function.__globals__.get, names):
            if getattr(value, "__name__", None) in _CALLS:  # imported under another name
                return True
            if isinstance(value, FunctionType) and value not in seen and not _is_of_library(value):
                seen.add(value)
                waiting.append(value)
    return False


def _is_of_library(function: FunctionType) -> bool:
    return function.__module__.partition(".")[0] in _LIBRARIES


def _names_in(code: CodeType) -> frozenset[str]:
    inner = (_names_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return frozenset(code.co_names).union(*inner)
