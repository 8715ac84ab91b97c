"""Values of fake tensors that follow from positions alone, since models choose their attention mask by them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...internals.fake_tensors import FakeTensor, FakeTensorMode, unset_fake_temporarily
from ...measure.profiling.tracer import tensors_of

_MOST = 2**21
"""Largest tensor, in elements, whose values are computed: positions of 256 sequences of 8,192 tokens. Transformers
looks at all before it does without a mask (5.23, masking_utils.py, ``find_packed_sequence_indices``)."""
_POSITIONS = frozenset(getattr(torch.ops.aten.arange, kind) for kind in ("default", "start", "start_step"))


@contextmanager
def known_values() -> Iterator[None]:
    """A context in which fake tensors that are made from positions or given numbers keep their values, as torch itself
    keeps single numbers. Transformers, which takes another way for fake tensors, does not see those whose values are
    known as such."""
    from torch._subclasses import fake_tensor

    replaced: list[tuple[Any, str, Any]] = [(fake_tensor, "CONSTANT_NUMEL_LIMIT", _MOST)]
    library = sys.modules.get("transformers.utils.import_utils")
    if hasattr(library, "is_fake_tensor"):
        replaced.append((library, "is_fake_tensor", _is_unknown))
    before = [getattr(module, name) for module, name, _ in replaced]
    for module, name, value in replaced:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(replaced, before, strict=True):
            setattr(module, name, value)


def dispatch(fakes: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Torch's result; known whole numbers are kept with it, if they are few."""
    with unset_fake_temporarily():
        if func in _POSITIONS:
            results: Any = fakes.dispatch(func, types, args, kwargs)
            if results.is_floating_point() or results.numel() > _MOST:
                return results
            return fakes.fake_tensor_converter.from_real_tensor(fakes, func(*args, **kwargs), make_constant=True)
        known = [one for one in tensors_of((args, kwargs)) if isinstance(one, FakeTensor) and not _is_unknown(one)]
        if known and torch.Tag.inplace_view not in func.tags:
            try:
                with _hidden(known):
                    results = fakes.dispatch(func, types, args, kwargs)
            except RuntimeError:  # how large its results are depends on the values, and is no more than they are
                return fakes.dispatch(func, types, args, kwargs)
            if any(one.numel() > _MOST for one in tensors_of(results)):
                return results
        return fakes.dispatch(func, types, args, kwargs)


@contextmanager
def _hidden(known: Sequence[FakeTensor]) -> Iterator[None]:
    """Values are hidden from torch within the block."""
    values = [one.constant for one in known]
    for one in known:
        one.constant = None
    try:
        yield
    finally:
        for one, value in zip(known, values, strict=True):
            one.constant = value


def _is_unknown(x: Any) -> bool:
    return isinstance(x, FakeTensor) and x.constant is None
