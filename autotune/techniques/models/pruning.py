"""Pruning: channels, hidden units and heads go, and with them a part of every tensor that depends on them."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ...errors import PlanError
from ..support.base import Run, Stage
from ..support.facts import Facts
from ..support.lossy import Lossy

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ...pruning import How, Record

_RATIOS = (0.25, 0.5)
"""That are worth trying: less than a fifth saved 1 to 7 % of the time."""
_STATISTICS = ("running_mean", "running_var")
"""Ends of the names of what a record has and is no parameter."""
_MAX_BYTES = 2**26
"""Of a record's file."""


class Pruning(Lossy):
    """Cut the least important channels, hidden units and attention heads, so that every tensor is smaller.

    Source: Fang et al. 2023, arXiv:2301.12900.
    """

    name: ClassVar[str] = "pruning"
    not_in_inference: ClassVar[str] = "what is cut recovers by training"
    goes_by: ClassVar[str | None] = "cut convolutions"
    stage: ClassVar[Stage] = Stage.PRUNING
    purposes: ClassVar[Mapping[str, str]] = {
        "none": "Leaves the model as it is.",
        "structured": "Cuts the least important channels, hidden units and heads: a smaller model, which computes "
        "something else until it has been trained on.",
    }
    kept_beside: ClassVar[frozenset[str]] = frozenset({"kept"})

    kind: Literal["none", "structured"] = "none"
    """``none`` keeps all; ``structured`` cuts whole channels, hidden units and heads."""
    ratio: float = Field(default=0.25, gt=0, lt=1)
    """Share of the channels, hidden units and heads that go; parameters fall by more, since each has two sides."""
    ratios: tuple[tuple[str, float], ...] | None = None
    """In its place: for groups of layers, by the path of the first, a share each, as a search has found them."""
    criterion: Literal["l1", "l2", "lamp", "random"] = "l2"
    """What is called important: norms of weights, those by layer-adaptive scores, or chance to compare with."""
    scope: Literal["layer", "global", "isomorphic"] = "layer"
    """Among what channels are ranked: those of a layer, of the model, or of layers that are alike."""
    round_to: int = Field(default=1, ge=1, le=1024)
    """Widths become multiples of it, downwards; heads stay whole in any case."""
    heads: bool = True
    """Whether attention heads are cut too."""
    untouchable: tuple[str, ...] = ()
    """Module paths that stay as they are, with all that is in them."""
    record: str | None = Field(default=None, pattern=r"^sha256:[0-9a-f]{64}$")
    """Hash of the record of what is kept, which lies next to the plan; absent, a cut is found anew."""
    kept: str | None = Field(default=None, repr=False)
    """The record itself, packed; a plan's file has it beside itself."""

    @model_validator(mode="after")
    def _check_record(self) -> Self:
        if self.kept is not None and self.record is None:
            raise ValueError("kept: is of a record, whose hash is absent. Leave both out to cut anew.")
        return self

    @model_validator(mode="after")
    def _check_ratios(self) -> Self:
        if wrong := next((f"{path}: {share:g}" for path, share in self.ratios or () if not 0 <= share < 1), None):
            raise ValueError(f"ratios: a share of at least 0 and below 1 was expected, but got {wrong}.")
        if self.ratios is not None and self.scope != "layer":
            raise ValueError(
                f"scope {self.scope} ranks layers against each other, and ratios say how much of each goes."
            )
        return self

    def describe(self, facts: Facts | None = None) -> str:
        """How much goes, and how that is chosen."""
        if self.kind == "none":
            return "no pruning"
        chosen = self.model_dump(exclude_defaults=True, exclude={"kind", "ratio", "ratios", "record", "kept"})
        rest = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in chosen.items())
        shares = [share for _, share in self.ratios or ()] or [self.ratio]
        widths = " to ".join(f"{share:.0%}" for share in sorted({min(shares), max(shares)}))
        gone = self._parameters_gone() / facts.num_parameters if facts is not None and self.kept is not None else 0.0
        of_all = f", {gone:.0%} of parameters" if gone else ""
        return f"prune {widths} of widths{of_all}" + (f" ({rest})" if rest else "")

    def _parameters_gone(self) -> int:
        """Numbers that the record leaves out, without torch."""
        assert self.kept is not None
        record = json.loads(gzip.decompress(base64.b64decode(self.kept)))
        sizes = [len(one) for one in record["sets"]]
        gone = 0
        for row in (row for name, row in record["tensors"].items() if not name.endswith(_STATISTICS)):
            pairs = zip(row["shape"], row["sets"], strict=True)
            left = math.prod(size if number is None else sizes[number] for size, number in pairs)
            gone += math.prod(row["shape"]) - left
        return gone

    @classmethod
    def facts_of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, device_type: str) -> Mapping[str, Any]:
        """What is known without a cut."""
        from ...pruning import obstacle

        return {"pruning_obstacle": obstacle(model)}

    @classmethod
    def offered(cls, facts: Facts) -> Iterable[Self]:
        """A quarter and a half, by layer."""
        return (cls(kind="structured", ratio=ratio) for ratio in _RATIOS)

    def obstacle(self, facts: Facts) -> str | None:
        """A cut is found by running the model on samples that can be read again."""
        if facts.pruning_obstacle is not None:
            return facts.pruning_obstacle
        if self.record is None and facts.dataset_kind == "iterable":
            return "a cut is found on two samples, and an iterable dataset is read only once"
        return None

    def removed(self, facts: Facts) -> float:
        """Of each width."""
        if self.kind == "none":
            return 0.0
        return fmean(share for _, share in self.ratios) if self.ratios else self.ratio

    @property
    def runs_model(self) -> bool:
        """A cut is found so, unless there is a record of it."""
        return self.kind != "none" and self.record is None

    @property
    def reads_values(self) -> bool:
        """Weights are ranked, and how many of a layer stay may depend on it."""
        return self.kind != "none"

    def files(self) -> dict[str, bytes]:
        """The record."""
        return {} if self.kept is None else {self._file: base64.b64decode(self.kept)}

    def with_files(self, folder: Path) -> Self:
        """With the record.

        Raises:
            PlanError: it is not there, or is another.
        """
        if self.record is None or self.kept is not None:
            return self
        path = folder / self._file
        try:
            with path.open("rb") as file:
                content = file.read(_MAX_BYTES)
        except OSError as error:
            raise PlanError(
                f"{path}: the plan's record of what pruning keeps cannot be read: {error.strerror}. Copy it next to "
                "the plan, or leave settings.pruning.record out to cut anew."
            ) from None
        from ...pruning import Record

        Record.decompressed(content, self.record, str(path))
        return self.model_copy(update={"kept": base64.b64encode(content).decode()})

    @property
    def _file(self) -> str:
        assert self.record is not None
        return f"pruning-{self.record.removeprefix('sha256:')[:16]}.json.gz"

    @property
    def how(self) -> How:
        """What is asked of a cut."""
        from ...pruning import How

        asked = (self.ratio, self.criterion, self.scope, self.round_to, self.heads, self.untouchable)
        return How(*asked, ratios=None if self.ratios is None else dict(self.ratios))

    def recorded(self, record: Record) -> Self:
        """With the record of a cut."""
        return self.model_copy(update={"record": record.hash, "kept": record.packed()})

    def as_applied(self, model: nn.Module) -> Self:
        """With the record of the cut that was made."""
        from ...pruning import Record, pruned_by

        packed = pruned_by(model) if self.kind != "none" and self.record is None else None
        if packed is None:
            return self
        return self.model_copy(update={"record": Record.hash_of(packed), "kept": packed})

    def undo(self, model: nn.Module) -> nn.Module:
        """What is gone cannot be had back.

        Raises:
            PlanError: an earlier plan has pruned the model.
        """
        from ...pruning import check_whole

        check_whole(model)
        return model

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """Cut the model in place, by the record or, where there is none, by one that is found now.

        Raises:
            PlanError: it cannot be cut so, or the record is not here or is of another model.
        """
        if self.kind == "none":
            return model
        from ...pruning import Record, cut, rebuild

        if self.record is not None and self.kept is None:
            raise PlanError(
                f"settings.pruning.record: the plan goes by a record, {self._file}, that is not here. Read the plan "
                "with autotune.load_plan(path), which looks for it next to the file; or leave record out to cut anew."
            )
        if self.record is not None and self.kept is not None:
            record = Record.unpacked(self.kept, self.record)
        else:
            record = cut(model, run, self.how)
        rebuild(model, record)
        return model

    def on_optimizer(
        self, optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None
    ) -> torch.optim.Optimizer:
        """The same; its state must not be of the whole model.

        Raises:
            PlanError: it has stepped before parameters were cut.
        """
        if self.kind != "none" and (found := next(_stale(optimizer), None)) is not None:
            raise PlanError(
                f"settings.pruning: the optimizer has stepped already: its {found}. Apply the plan before the first "
                "step, or pass a function of the parameters that builds the optimizer."
            )
        return optimizer


def _stale(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """What an optimizer keeps for a parameter of another shape."""
    import torch

    for parameter, kept in optimizer.state.items():
        for key, value in kept.items() if isinstance(parameter, torch.Tensor) else ():
            if isinstance(value, torch.Tensor) and value.dim() == parameter.dim():
                pairs = zip(value.shape, parameter.shape, strict=True)
                if not all(one in (1, other) for one, other in pairs):  # 1: summed over
                    yield f"{key} has shape {list(value.shape)}, of a parameter of shape {list(parameter.shape)} now"
