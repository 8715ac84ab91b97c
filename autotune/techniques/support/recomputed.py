"""A block's forward that is run again in backward, with what it was given and the buffers that it had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from .forwards import has_forward

if TYPE_CHECKING:
    from torch import Tensor, nn


def is_recomputed(module: nn.Module) -> bool:
    """Whether its forward is :func:`recomputed`."""
    return has_forward(module, recomputed)


def recomputed(forward: Any, buffers: Buffers, /, *args: Any, **kwargs: Any) -> Any:
    """What a block's forward returns, whose inside is computed again when backward comes to it.

    A program that is compiled of it does that by itself: its backward has the block's operations once more, random
    numbers are drawn again from the same seeds, and buffers change at its end, once (``TagActivationCheckpoint`` in
    torch 2.13, _higher_order_ops/wrap.py).
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():
        if buffers.keeps_products:
            return checkpoint(forward, *args, use_reentrant=False, context_fn=_with_products, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    call, given = _positional(forward, args, kwargs)
    return checkpoint(call, *given, use_reentrant=False, context_fn=buffers.contexts)


def _positional(
    forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The same call with positional arguments alone, nothing given twice.

    Positional, because torch keeps the random state of those devices alone that tensors among these are on, and
    dropout would be another when it is computed again (torch 2.13, utils/checkpoint.py: ``get_device_states(*args)``).
    Nothing twice: what is given as query, key and value at once is one tensor to an attention, and is to be one when
    it is computed again, which hooks on saved tensors would make three.
    """
    once = {id(one): one for one in (*args, *kwargs.values())}
    numbers = {one: number for number, one in enumerate(once)}
    places, named = [numbers[id(one)] for one in args], {name: numbers[id(one)] for name, one in kwargs.items()}

    def call(*given: Any) -> Any:
        return forward(*(given[place] for place in places), **{name: given[place] for name, place in named.items()})

    return call, tuple(once.values())


class Buffers:
    """The buffers of a block that its forward changes (running statistics, a spectral norm's vectors).

    Recomputation starts from copies of what the first forward started from, and leaves the block's own alone: that
    forward has changed them. Copies and not None, so that as many tensors are saved as the first time.
    """

    def __init__(self, block: nn.Module, keeps_products: bool = False) -> None:
        """
        Args:
            block: whose buffers they are.
            keeps_products: whether its products (:data:`_PRODUCTS`) are kept, and all else is computed again.
        """
        self._block, self.keeps_products = block, keeps_products
        self._changes: dict[tuple[nn.Module, str], bool] = {}
        """Whether a forward in training changed it, the first time: masks and the like are not copied again."""

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For the first forward and for its recomputation."""
        before: dict[tuple[nn.Module, str], Tensor] = {}
        first, again = self._note(before), self._replay(before)
        if not self.keeps_products:
            return first, again
        keeping, kept = _with_products()
        return _within(first, keeping), _within(again, kept)

    def spared(self) -> AbstractContextManager[None]:
        """For a forward besides: what it changes are copies."""
        return self._replay(dict(self._variable()))

    @contextmanager
    def _note(self, before: dict[tuple[nn.Module, str], Tensor]) -> Iterator[None]:
        versions: dict[tuple[nn.Module, str], tuple[Tensor, int]] = {}
        for key, buffer in self._variable():
            before[key] = buffer.clone()
            versions[key] = buffer, buffer._version
        yield
        for key in [key for key in before if key not in self._changes]:
            module, name = key
            after = module._buffers.get(name)
            is_same = _is_untouched(*versions[key], after) if _is_fake(before[key]) else _same(before[key], after)
            self._changes[key] = _is_normalization(module) or not is_same
            if not self._changes[key]:
                del before[key]

    @contextmanager
    def _replay(self, before: dict[tuple[nn.Module, str], Tensor]) -> Iterator[None]:
        kept = {(module, name): module._buffers[name] for module, name in before}
        for (module, name), buffer in before.items():
            module._buffers[name] = buffer.clone()
        try:
            yield
        finally:
            for (module, name), own in kept.items():
                module._buffers[name] = own

    def _variable(self) -> Iterator[tuple[tuple[nn.Module, str], Tensor]]:
        for module in self._block.modules():
            for name, buffer in module._buffers.items() if module.training else ():
                if buffer is not None and self._changes.get((module, name), True):
                    yield (module, name), buffer


_ATTENTION = "_scaled_dot_product_"
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution"}
"""Operations of ``torch.ops.aten``, attention beside them, that take most of a block's time, for results that are a
small part of what it keeps."""


def _with_products() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Selective checkpointing, by torch's own: contexts that keep the products of a forward, and that give them again.

    Source: https://docs.pytorch.org/docs/stable/checkpoint.html
    """
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-any-return, no-untyped-call]


def _policy(context: Any, operation: Any, /, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    name = operation.__name__.partition(".")[0]
    is_product = name in _PRODUCTS or name.startswith(_ATTENTION)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _within(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _is_normalization(module: nn.Module) -> bool:
    """Whether its buffers are running statistics, which a batch may leave as they were by chance."""
    from torch.nn.modules.batchnorm import _NormBase

    return isinstance(module, _NormBase)


def _same(before: Tensor, after: Tensor | None) -> bool:
    """By value: batch_norm changes its statistics without a trace in their version."""
    return after is not None and after.shape == before.shape and bool((after == before).all())


def _is_fake(tensor: Tensor) -> bool:
    """Whether it has no values that could be compared."""
    from ...internals.fake_tensors import FakeTensor

    return isinstance(tensor, FakeTensor)


def _is_untouched(before: Tensor, version: int, after: Tensor | None) -> bool:
    """By version: what is left to tell fake tensors by."""
    return after is before and after._version == version
