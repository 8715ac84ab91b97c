"""What is known of a job's memory without running it: measurements of its plans, and predictions that are kept.

For schedulers, which ask before they place a job. A measurement holds for the type of device that it was made on. By
how much runs of a job differ is known from all its plans, at whatever batch, on whatever card.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select

from ..errors import PlanError
from ..estimates.cards import Card, option_name, recognised
from ..estimates.types import Estimate
from ..files import write_text
from ..plan import ROOM, Plan
from ..units import format_bytes, format_percent
from ..words import count
from .problems import Problem
from .store.database import Database
from .store.states import State
from .store.tables import SEARCHES

_MOST_APART = 0.1
"""Of a peak: by how much runs of a plan are taken to differ because those of another of the job did. One that was noisy
says no more of the others."""


class Known(BaseModel):
    """What a job takes on one type of card."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    card: str
    memory_bytes: int
    """What torch can have of it."""
    fits: bool
    """Whether the job does, within the budget and the card's memory, at the upper end of the interval."""
    how: Literal["measured", "predicted", "unknown"]
    """``measured`` by a search on such a card, with its plan; ``predicted`` of the job as it stands, from traces."""
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


class Predicted(BaseModel):
    """One job's predicted memory, as :class:`Predictions` keeps it."""

    model_config = ConfigDict(frozen=True)

    fingerprint: str = Field(pattern="^sha256:[0-9a-f]{64}$")
    owner: str
    cards: dict[str, Estimate]


@dataclass(frozen=True)
class Predictions:
    """Kept answers: plans in the database, and estimates in files of the state folder."""

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
            asker: whose estimates count: those of others are what their code says.
            own_alone: whether the plans of the asker's own searches count alone.
            batch: samples in a forward pass; None is any.
        """
        plans = self._plans(fingerprint, asker if own_alone else None)
        estimates = self._estimates(fingerprint, asker)
        return [known_on(card, budget_bytes, plans, estimates, batch) for card in cards]

    def keep(self, predicted: Predicted) -> None:
        """Keep a job's estimates beside those of other cards.

        Raises:
            Problem: 507, there is no room.
        """
        try:
            self.folder.mkdir(exist_ok=True, mode=0o700)
            with self._writing:
                known = self._estimates(predicted.fingerprint, predicted.owner)
                whole = predicted.model_copy(update={"cards": {**known, **predicted.cards}})
                write_text(self._file(predicted.fingerprint, predicted.owner), whole.model_dump_json(), PlanError)
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

    def _estimates(self, fingerprint: str, owner: str) -> dict[str, Estimate]:
        """By card."""
        try:
            return Predicted.model_validate_json(self._file(fingerprint, owner).read_bytes()).cards
        except (OSError, ValueError):  # there is none, or another version's
            return {}

    def _file(self, fingerprint: str, owner: str) -> Path:
        name = hashlib.sha256(f"{fingerprint}/{owner}".encode()).hexdigest()
        return self.folder / f"{name}.json"


def known_on(
    card: Card,
    budget_bytes: int | None,
    plans: Sequence[tuple[str, Plan]],
    estimates: Mapping[str, Estimate],
    batch: int | None,
) -> Known:
    """What is known of a job on one card, as :meth:`Predictions.known` says.

    Args:
        card: which.
        budget_bytes: what may be taken of it; None is all of it.
        plans: of the job, on any card, with their searches, the fastest first.
        estimates: of the job, by card.
        batch: samples in a forward pass; None is any.
    """
    limit = min(card.device.memory_bytes, budget_bytes or card.device.memory_bytes)
    apart = min(_MOST_APART, max((_apart(plan) for _, plan in plans if _card_of(plan) is not None), default=0.0))
    own = [
        _measured(card, limit, search, plan, apart)
        for search, plan in plans
        if _card_of(plan) == card and batch in (None, _batch(plan))
    ]
    if own:  # the fastest that fits, else what takes least
        return min(own, key=lambda row: (not row.fits, row.high_bytes if not row.fits else 0))
    estimate = estimates.get(option_name(card))
    if estimate is not None and batch in (None, estimate.reference.micro):
        return _predicted(card, limit, estimate)
    said = "nothing is kept of this job on such a card: send its archive, or search there"
    return Known(**_card(card), fits=False, how="unknown", sure=said)


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


def _card_of(plan: Plan) -> Card | None:
    """That it was found on; None on a CPU, and on a card that has no name."""
    return recognised(plan.environment.device) if plan.environment is not None else None


def _batch(plan: Plan) -> int | None:
    return plan.settings.batch.micro if plan.settings.batch is not None else None


def _apart(plan: Plan) -> float:
    """By which share of the largest its processes differ."""
    assert plan.measured is not None, "others are left out"
    return (plan.measured.peak.spread or 0) / plan.measured.peak.process


def _measured(card: Card, limit_bytes: int, search: str, plan: Plan, apart: float) -> Known:
    assert plan.measured is not None, "others are left out"
    peak, margin = plan.measured.peak, plan.budget.margin
    spread = max(peak.spread or 0, round(apart * peak.process))
    runs = count(plan.measured.samples_per_s.repeats, "process", "fresh processes")
    above = f"; above it {ROOM:.0f} times the {format_bytes(spread)} that runs of it differ by" if spread else ""
    return Known.of(
        card,
        limit_bytes,
        round(peak.process - max(margin * peak.process, spread)),
        peak.process,
        peak.model_copy(update={"spread": spread}).next_bytes(margin),
        how="measured",
        batch=_batch(plan),
        host_bytes=peak.host,
        search=search,
        sure=f"the largest of {runs} with the plan of search {search}, {format_percent(margin)} on either side{above}",
    )


def _predicted(card: Card, limit_bytes: int, estimate: Estimate) -> Known:
    own, largest = estimate.reference, estimate.surely
    whole = format_bytes(card.device.memory_bytes)
    more = f"; batches of {largest} fit the card's {whole}" if largest and largest > own.micro else ""
    return Known.of(
        card,
        limit_bytes,
        own.process.low,
        own.process.value,
        own.process.high,
        how="predicted",
        batch=own.micro,
        sure=f"{estimate.how}, not measured: at most one peak in twenty is to be above the interval{more}",
    )
