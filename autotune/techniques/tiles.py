"""Tiles: feed-forward parts compute some of all positions at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from ..errors import PlanError
from .support.base import Effect, Run, Stage, Technique
from .support.facts import Facts
from .support.recomputed import Buffers, recomputed

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from . import Settings


class Tiles(Technique):
    """Compute feed-forward parts in tiles of the positions, each again in backward.

    Source: Bekman et al. 2025, arXiv:2506.13996 (tiled MLP).
    """

    name: ClassVar[str] = "tiles"
    stage: ClassVar[Stage] = Stage.TILES
    affects: ClassVar[frozenset[Effect]] = frozenset({"tensors", "code"})
    trades_time: ClassVar[bool] = True
    only_where_listed: ClassVar[bool] = True
    rewrites: ClassVar[bool] = True
    purposes: ClassVar[Mapping[str, str]] = {
        "feed_forward": "Computes feed-forward parts for some positions at a time, and each once more in backward.",
    }

    kind: Literal["none", "feed_forward"] = "none"
    """``none`` is stock; ``feed_forward`` holds what is inside of one tile at a time, in forward and in backward."""
    number: int = Field(default=8, ge=2)
    """Tiles that all positions of a micro-batch are cut into."""

    def describe(self, facts: Facts | None = None) -> str:
        """``feed-forward parts in 8 tiles``."""
        return super().describe(facts) if self.kind == "none" else f"feed-forward parts in {self.number} tiles"

    @classmethod
    def facts_of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, device_type: str) -> Mapping[str, Any]:
        """Whether there are such parts."""
        from .support.feed_forward import find_feed_forwards

        return {"num_feed_forwards": len(find_feed_forwards(model))}

    @classmethod
    def choices(cls, facts: Facts) -> tuple[Tiles, ...]:
        """Both where there are such parts."""
        other = cls(kind="feed_forward")
        return (cls(), other) if other.unavailable(facts) is None else (cls(),)

    def unavailable(self, facts: Facts) -> str | None:
        """There must be such parts."""
        if self.kind == "none" or facts.num_feed_forwards:
            return None
        return "no module of the model is known to compute each position by itself"

    def conflicts(self, settings: Settings) -> str | None:
        """Who else decides what is kept of them."""
        if self.kind == "none":
            return None
        if settings.compile.kind != "none":
            return "a compiled program keeps what it chooses of each tile: use one"
        if settings.checkpointing.kind == "selective":
            return "selective checkpointing would keep the products of all tiles: use kind blocks or chosen there"
        return None

    def undo(self, model: nn.Module) -> nn.Module:
        """Their own forward."""
        for module in model.modules():
            forward = vars(module).get("forward")
            if isinstance(forward, functools.partial) and forward.func is _in_tiles:
                del vars(module)["forward"]
        return model

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """Give the parts a forward in tiles; parameters, hooks and ``state_dict`` keys stay.

        Raises:
            PlanError: there are none.
        """
        if self.kind == "none":
            return model
        from .support.feed_forward import find_feed_forwards

        parts = find_feed_forwards(model)
        if not parts:
            raise PlanError(
                "settings.tiles.kind: no module of the model is known to compute each position by itself, from "
                " linear layers and activations alone. Use kind: none."
            )
        for part in parts:
            module: Any = part.module
            # As in checkpointing: on the instance, and a bound method.
            module.forward = functools.partial(_in_tiles, module.forward, self.number, part.dropout, Buffers(module))
        return model


def _in_tiles(forward: Any, number: int, dropout: nn.Module | None, buffers: Buffers, /, *args: Any, **kw: Any) -> Any:
    """What a feed-forward part returns, given one tensor of (…, positions, features). One without positions is not cut,
    nor one of fewer than two positions a tile.

    Args:
        forward: its own.
        number: tiles.
        dropout: the last that it does, which is done once for all tiles: so it draws what it would draw.
        buffers: none, since nothing in it has any that change.
        args: what it is given, as its caller gives it.
        kw: the same by name.
    """
    import torch

    given = (*args, *kw.values())
    x = given[0] if len(given) == 1 else None
    if not isinstance(x, torch.Tensor) or x.ndim < 3 or x.numel() < 2 * number * x.shape[-1]:
        return forward(*args, **kw)

    def tile(some: Tensor) -> Tensor:
        with _left_out(dropout):
            return forward(some)  # type: ignore[no-any-return]

    done = torch.cat([recomputed(tile, buffers, some) for some in x.flatten(0, -2).tensor_split(number)])
    found = done.view(*x.shape[:-1], done.shape[-1])
    return found if dropout is None else dropout(found)


@contextmanager
def _left_out(dropout: nn.Module | None) -> Iterator[None]:
    if dropout is None:
        yield
        return
    was, dropout.training = dropout.training, False
    try:
        yield
    finally:
        dropout.training = was
