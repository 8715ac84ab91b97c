"""What is known of a job's memory without running it: measurements of its plans, what its runs took as they told, and
predictions that are kept.

For schedulers, which ask before they place a job. A measurement holds for the type of device that it was made on. By
how much runs of a job differ is known from all its plans and runs, at whatever batch, on cards of one make.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select

from ..errors import PlanError
from ..estimates.cards import CARDS, Card, option_name, recognised
from ..estimates.types import Estimate
from ..files import write_text
from ..plan import ROOM, Budget, Peak, Plan
from ..units import format_bytes, format_percent
from ..words import count
from .problems import Problem
from .store.database import Database
from .store.states import State
from .store.tables import SEARCHES

_MOST_BATCHES = 64
"""That are remembered of a job on a card: the newest."""
_ENOUGH = 3
"""Runs that tell as much as a search's repeats."""
_MARGIN = Budget().margin


class Known(BaseModel):
    """What a job takes on one type of card."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    card: str
    memory_bytes: int
    """What torch can have of it."""
    fits: bool
    """Whether the job does, within the budget and the card's memory, at the upper end of the interval."""
    how: Literal["measured", "predicted", "unknown"]
    """``measured`` by a search on such a card, with its plan, or by three runs that told what they took; ``predicted``
    of the job as it stands, from traces."""
    batch: int | None = None
    """Samples in a forward pass."""
    peak_bytes: int | None = None
    """What the card charges the process at its peak."""
    low_bytes: int | None = None
    """Lower end of the interval."""
    high_bytes: int | None = None
    """Upper end: what to ask for."""
    host_bytes: int | None = None
    """What the job takes of the host's memory; absent where it was not measured."""
    search: str | None = None
    """Id of the search whose plan it is of."""
    sure: str
    """How sure that is, in words."""

    @classmethod
    def of(cls, card: Card, limit_bytes: int, low: int, value: int, high: int, **more: Any) -> Self:
        """With an interval."""
        sizes = {"peak_bytes": value, "low_bytes": low, "high_bytes": high}
        return cls(**_card(card), fits=high <= limit_bytes, **sizes, **more)


def _card(card: Card) -> dict[str, Any]:
    return {"card": option_name(card), "memory_bytes": card.device.memory_bytes}


class Took(BaseModel):
    """What runs of a job took on a type of card, at one batch."""

    model_config = ConfigDict(frozen=True)

    batch: int
    """Samples in a forward pass."""
    runs: int
    """How many ended well."""
    least_bytes: int
    """What the card charged the one of them that took least."""
    most_bytes: int
    """The one that took most; one that ran out of memory took more than it was given."""

    def and_then(self, other: Took) -> Took:
        """With a later run, at the same batch."""
        runs = [one for one in (self, other) if one.runs] or [self, other]
        return Took(
            batch=self.batch,
            runs=self.runs + other.runs,
            least_bytes=min(one.least_bytes for one in runs),
            most_bytes=max(self.most_bytes, other.most_bytes),
        )

    @property
    def apart(self) -> float:
        """By which share of the largest they differ."""
        return 1 - self.least_bytes / self.most_bytes if self.runs else 0.0


class Predicted(BaseModel):
    """What is known of one job without a search, as :class:`Predictions` keeps it."""

    model_config = ConfigDict(frozen=True)

    fingerprint: str = Field(pattern="^sha256:[0-9a-f]{64}$")
    owner: str
    cards: dict[str, Estimate] = {}
    took: dict[str, tuple[Took, ...]] = {}
    """By card, one for each batch."""

    def and_then(self, more: Predicted) -> Predicted:
        """With later estimates, and later runs beside those that are known."""
        took = {name: _added(self.took.get(name, ()), rows) for name, rows in more.took.items()}
        return more.model_copy(update={"cards": {**self.cards, **more.cards}, "took": {**self.took, **took}})


@dataclass(frozen=True)
class Predictions:
    """Kept answers: plans in the database; estimates, and what runs took, in files of the state folder."""

    database: Database
    folder: Path
    _writing: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def known(
        self,
        fingerprint: str,
        cards: Sequence[Card],
        budget_bytes: int | None,
        asker: str,
        *,
        own_alone: bool,
        batch: int | None = None,
    ) -> list[Known]:
        """What is known of a job on each card.

        Args:
            fingerprint: of the task, as plans have it.
            cards: which.
            budget_bytes: what may be taken of each; None is all of it.
            asker: whose estimates and runs count: those of others are what their code says.
            own_alone: whether the plans of the asker's own searches count alone.
            batch: samples in a forward pass; None is any.
        """
        plans, kept = self._plans(fingerprint, asker if own_alone else None), self._kept(fingerprint, asker)
        return [known_on(card, budget_bytes, plans, kept, batch) for card in cards]

    def keep(self, more: Predicted) -> None:
        """Keep a job's estimates beside those of other cards, and add its runs to those that are known.

        Raises:
            Problem: 507, there is no room.
        """
        try:
            self.folder.mkdir(exist_ok=True, mode=0o700)
            with self._writing:
                whole = self._kept(more.fingerprint, more.owner).and_then(more)
                write_text(self._file(more.fingerprint, more.owner), whole.model_dump_json(), PlanError)
        except (OSError, PlanError):
            raise Problem(507, "the service cannot keep the estimate: is its disk full?") from None

    def _plans(self, fingerprint: str, owner: str | None) -> list[tuple[str, Plan]]:
        """Plans of the task by their searches, the fastest first."""
        asked = select(SEARCHES.c.id, SEARCHES.c.plan).where(
            SEARCHES.c.state == State.SUCCEEDED, SEARCHES.c.plan.contains(fingerprint, autoescape=True)
        )
        with self.database.reading() as connection:
            rows = connection.execute(asked if owner is None else asked.where(SEARCHES.c.owner == owner)).all()
        found: list[tuple[float, str, Plan]] = []
        for row in rows:
            with suppress(PlanError):  # of an earlier version
                plan = Plan.from_yaml(row.plan, row.id)
                is_job = plan.task is not None and plan.task.fingerprint == fingerprint and plan.inference is None
                if plan.measured is not None and is_job:
                    found.append((-plan.measured.samples_per_s.value, row.id, plan))
        return [(search, plan) for _, search, plan in sorted(found, key=lambda one: one[:2])]

    def _kept(self, fingerprint: str, owner: str) -> Predicted:
        try:
            return Predicted.model_validate_json(self._file(fingerprint, owner).read_bytes())
        except (OSError, ValueError):  # there is none, or another version's
            return Predicted(fingerprint=fingerprint, owner=owner)

    def _file(self, fingerprint: str, owner: str) -> Path:
        name = hashlib.sha256(f"{fingerprint}/{owner}".encode()).hexdigest()
        return self.folder / f"{name}.json"


def known_on(
    card: Card, budget_bytes: int | None, plans: Sequence[tuple[str, Plan]], kept: Predicted, batch: int | None
) -> Known:
    """What is known of a job on one card, as :meth:`Predictions.known` says.

    Args:
        card: which.
        budget_bytes: what may be taken of it; None is all of it.
        plans: of the job, on any card, with their searches, the fastest first.
        kept: estimates and runs.
        batch: samples in a forward pass; None is any.
    """
    limit = min(card.device.memory_bytes, budget_bytes or card.device.memory_bytes)
    took = {one.batch: one for one in kept.took.get(option_name(card), ()) if batch in (None, one.batch)}
    apart = max(_apart(card, plans, kept), default=0.0)
    own = [
        _measured(card, limit, search, plan, took.get(_batch(plan) or 0), apart)
        for search, plan in plans
        if _is_on(plan, card) and batch in (None, _batch(plan))
    ]
    estimate = kept.cards.get(option_name(card))
    if own:  # the fastest that fits, else what takes least
        return min(own, key=lambda row: (not row.fits, row.high_bytes if not row.fits else 0))
    if estimate is not None and batch in (None, estimate.reference.micro):
        return _predicted(card, limit, estimate, took.get(estimate.reference.micro), apart)
    return _told(card, limit, took, apart)


def read_estimate(text: bytes) -> tuple[str, dict[str, Estimate]]:
    """The fingerprint and the estimates that ``autotune estimate --card … --json`` printed.

    Raises:
        ValueError: it is no such document.
    """
    document = json.loads(text)
    if not isinstance(document, dict) or not isinstance(rows := document.get("cards"), list):
        raise ValueError("no document of an estimate for cards")
    return str(document.get("fingerprint")), {
        str(row.get("card")): Estimate.model_validate(row.get("estimate")) for row in rows if isinstance(row, dict)
    }


def _is_on(plan: Plan, card: Card) -> bool:
    return plan.environment is not None and recognised(plan.environment.device) == card


def _batch(plan: Plan) -> int | None:
    return plan.settings.batch.micro if plan.settings.batch is not None else None


def _added(known: Sequence[Took], more: Sequence[Took]) -> tuple[Took, ...]:
    """Each batch once, the newest last."""
    found = {one.batch: one for one in known}
    for one in more:
        before = found.pop(one.batch, None)
        found[one.batch] = before.and_then(one) if before else one
    return tuple(found.values())[-_MOST_BATCHES:]


def _apart(card: Card, plans: Sequence[tuple[str, Plan]], kept: Predicted) -> Iterator[float]:
    """By which shares runs of a job are known to differ, at whatever batch, on cards of this one's make."""
    for other in CARDS:
        if other.is_amd == card.is_amd:
            yield from (one.apart for one in kept.took.get(option_name(other), ()))
    for _, plan in plans:
        on = recognised(plan.environment.device) if plan.environment is not None else None
        if on is not None and on.is_amd == card.is_amd and plan.measured is not None:
            yield (plan.measured.peak.spread or 0) / plan.measured.peak.process


def _sized(peak: Peak, most_bytes: int, apart: float, margin: float) -> tuple[tuple[int, int, int], str]:
    """Interval of the next run, and in words what it is above the largest."""
    largest = peak.model_copy(update={"process": most_bytes, "spread": round(apart * most_bytes)})
    spread = largest.spread or 0
    said = f"; above it {ROOM:.0f} times the {format_bytes(spread)} that they differ by" if spread else ""
    low = round(most_bytes - max(margin * most_bytes, spread))
    return (low, most_bytes, largest.next_bytes(margin)), f"{format_percent(margin)} on either side{said}"


def _measured(card: Card, limit_bytes: int, search: str, plan: Plan, took: Took | None, apart: float) -> Known:
    assert plan.measured is not None, "others are left out"
    peak = plan.measured.peak
    most = max(peak.process, took.most_bytes if took else 0)
    size, around = _sized(peak, most, max(apart, 1 - (peak.process - (peak.spread or 0)) / most), plan.budget.margin)
    runs = count(plan.measured.samples_per_s.repeats, "process", "fresh processes")
    told = f" and of {count(took.runs, 'run')} since" if took else ""
    return Known.of(
        card,
        limit_bytes,
        *size,
        how="measured",
        batch=_batch(plan),
        host_bytes=peak.host,
        search=search,
        sure=f"the largest of {runs} with the plan of search {search}{told}, {around}",
    )


def _told(card: Card, limit_bytes: int, took: Mapping[int, Took], apart: float) -> Known:
    """By runs alone, at the batch of most of them."""
    most = max(took.values(), key=lambda one: one.runs, default=None)
    if most is None or most.runs < _ENOUGH:
        said = "nothing is kept of this job on such a card: send its archive, or search there"
        if most is not None:
            said = f"{count(most.runs, 'run')} of it told what they took on such a card, and {_ENOUGH} are needed"
        return Known(**_card(card), fits=False, how="unknown", sure=said)
    size, around = _sized(Peak(process=most.most_bytes), most.most_bytes, apart, _MARGIN)
    said = f"the largest of {count(most.runs, 'run')} that told what they took, {around}"
    return Known.of(card, limit_bytes, *size, how="measured", batch=most.batch, sure=said)


def _predicted(card: Card, limit_bytes: int, estimate: Estimate, took: Took | None, apart: float) -> Known:
    own, largest = estimate.reference, estimate.surely
    if took is not None and took.runs >= _ENOUGH:
        return _told(card, limit_bytes, {took.batch: took}, apart)
    more = f"; batches of {largest} fit {format_bytes(limit_bytes)}" if largest and largest > own.micro else ""
    above = round((1 + _MARGIN) * took.most_bytes) if took is not None else 0
    if above > own.process.high:
        more += f"; a run has told that it took more, and is asked for with {format_percent(_MARGIN)}"
    return Known.of(
        card,
        limit_bytes,
        own.process.low,
        own.process.value,
        max(own.process.high, above),
        how="predicted",
        batch=own.micro,
        sure=f"{estimate.how}, not measured: at most one peak in twenty is to be above the interval{more}",
    )
