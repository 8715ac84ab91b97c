"""The contexts of a plan around each call of a script's model, and until the backward pass of its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ...nested import widened
from ...techniques import Settings
from ...techniques.precision import Precision


class Contexts:
    """Opens them with each call of the model. They stay open for the loss, until its backward pass; a call that records
    no graph closes them itself.

    Autocast is of the call alone: what it returns goes on in the dtype of the model's parameters, into a loss, into
    numpy or into another model, as without a plan.
    """

    def __init__(self, settings: Settings, begins: Callable[[Any, Any], None], ends: Callable[[Any], None]) -> None:
        """
        Args:
            settings: the plan's.
            begins: told of each call, with the model and its inputs.
            ends: told once a call is over that records a graph, with what it returns.
        """
        self._precision = settings.precision
        self._others = settings.having(Precision())
        self._begins, self._ends = begins, ends
        self._open = ExitStack()
        self._depth = 0
        self._is_in_call = False

    @property
    def is_within(self) -> bool:
        """Whether the model is called, or a backward pass goes on."""
        return self._depth > 0

    @property
    def is_in_forward(self) -> bool:
        """Whether what runs is the script's forward pass: the model's call or what is around it, but not a block that
        is recomputed in a backward pass."""
        return self._is_in_call or not self._depth

    def close(self) -> None:
        """Close those that are open for a loss."""
        self._open.close()

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """A backward pass, in which blocks may be recomputed."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def enclose(self, model: Any, parameters: list[Any]) -> None:
        """Have each call of a module open them.

        By the attribute by which torch calls a compiled module: a copy of the model does not have it.

        Args:
            model: the plan's, or a part of it that the script calls by itself.
            parameters: the plan's model's.
        """
        device = parameters[0].device.type
        dtype = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
        inner = model._compiled_call_impl or model._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth or is_traced():
                return inner(*args, **kwargs)
            self.close()
            self._begins(model, (args, kwargs))
            self._depth += 1
            has_returned, outputs = False, None
            try:
                self._open.enter_context(self._others.forward_context(device))
                with self._precision.forward_context(device):
                    self._is_in_call = True
                    outputs = inner(*args, **kwargs)
                has_returned = True
                outputs = widened(outputs, dtype) if self._precision.autocast == "bf16" else outputs
                return outputs
            finally:
                if not has_returned:
                    self.close()
                self._depth -= 1
                self._is_in_call = False
                if torch.is_grad_enabled():
                    self._ends(outputs)
                else:
                    self.close()

        vars(model)["_compiled_call_impl"] = call  # not through setattr: a wrapper of torch.compile's hands that on


def is_traced() -> bool:
    """Whether the model is called to make a graph of it (TensorBoard's ``add_graph``, an export), and not to train."""
    return bool(torch._C._get_tracing_state()) or torch.compiler.is_exporting()
