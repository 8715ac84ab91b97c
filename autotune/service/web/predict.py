"""``POST /v1/predict``: what a job takes on types of cards, for schedulers that ask before they place it; and
``POST /v1/took``: what a run of it took."""

from __future__ import annotations

from typing import Annotated, Self

from fastapi import APIRouter, Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt, model_validator

from ...errors import UserError
from ...estimates.cards import Card, find_cards, option_name
from ...searches.options import HostBudgetOption
from ..estimator import Estimator
from ..predictions import Known, Predicted, Predictions, Took
from ..problems import Problem
from ..service import Service
from ..spec import inside
from .access import GuardedRoute, Submitter
from .answers import refusals

PREDICT = APIRouter(prefix="/v1", route_class=GuardedRoute, responses=refusals(400, 401, 403, 413, 422, 429, 503, 507))

_CardName = Annotated[str, Field(min_length=1, max_length=60)]
_Fingerprint = Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]


class PredictBody(BaseModel):
    """A job, and where it may run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fingerprint: _Fingerprint | None = None
    """As its plans have it, and an earlier answer."""
    archive: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """In its place: SHA-256 of an archive that was put before; its code runs, in a process of its own."""
    task: Annotated[str, Field(max_length=200), AfterValidator(inside)] = "model.py"
    """In the archive: ``model.py`` or ``model.py:name``."""
    cards: list[_CardName] = Field(min_length=1, max_length=32)
    """Types of cards, as ``autotune estimate --card`` takes them."""
    budget: HostBudgetOption | None = None
    """What may be taken of each; None is all that it has."""
    batch: PositiveInt | None = None
    """Samples in a forward pass; None is any that is known of: a plan's, or the job's own."""

    @model_validator(mode="after")
    def _is_of_one_job(self) -> Self:
        if (self.fingerprint is None) == (self.archive is None):
            raise ValueError("either fingerprint or archive was expected")
        return self


class TookBody(BaseModel):
    """A run of a job that has ended."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fingerprint: _Fingerprint
    """As its plans have it, and an answer of ``/v1/predict``."""
    card: _CardName
    """Type of card that it ran on."""
    batch: PositiveInt
    """Samples in a forward pass."""
    peak: HostBudgetOption = Field(gt=0)
    """What the card charged it at most; of one that ran out of memory, what it was given."""
    ran_out: bool = False
    """Whether it ran out of memory."""


class Prediction(BaseModel):
    """What is known of a job."""

    fingerprint: str
    cards: list[Known]
    """A row for each type of card that was asked about, in that order."""


@PREDICT.post("/predict")
def predict(request: Request, body: PredictBody, caller: Submitter) -> Prediction:
    """The batch, the peak with its interval, and how sure it is, on each type of card: measured by searches on such a
    card, or predicted of an archive's job as it stands. The answer for an archive is kept, under its fingerprint."""
    service: Service = request.app.state.service
    estimator: Estimator = request.app.state.estimator
    cards = _cards(",".join(body.cards))
    kept: Predictions = request.app.state.predictions
    fingerprint = body.fingerprint
    if body.archive is not None:
        if not service.may_use(caller, body.archive):
            raise Problem(422, f"archive {body.archive} is not here. PUT /v1/archives/{body.archive} first.")
        fingerprint, found = estimator.estimate(body.archive, body.task, ",".join(map(option_name, cards)))
        kept.keep(Predicted(fingerprint=fingerprint, owner=caller.name, cards=found))
    assert fingerprint is not None, "the body has one of both"
    own_alone = service.private or service.users is not None  # else all trust each other's measurements
    rows = kept.known(fingerprint, cards, body.budget, caller.name, own_alone=own_alone, batch=body.batch)
    return Prediction(fingerprint=fingerprint, cards=rows)


@PREDICT.post("/took", status_code=204)
def took(request: Request, body: TookBody, caller: Submitter) -> None:
    """What a run of a job took, so that its owner's next one is answered with it: it counts beside measurements and
    predictions at its batch, and what runs differ by at every batch. Three are a measurement by themselves."""
    kept: Predictions = request.app.state.predictions
    card, *others = _cards(body.card)
    if others:
        raise Problem(422, f"card: one was expected, and {body.card!r} names several.")
    run = Took(batch=body.batch, runs=int(not body.ran_out), least_bytes=body.peak, most_bytes=body.peak)
    more = Predicted(fingerprint=body.fingerprint, owner=caller.name, took={option_name(card): (run,)})
    kept.keep(more)


def _cards(names: str) -> tuple[Card, ...]:
    """Those with these names.

    Raises:
        Problem: 422, there is no such card.
    """
    try:
        return find_cards(names)
    except UserError as error:
        said = str(error).removeprefix("--card: ").partition(" `--card all`")[0]
        raise Problem(422, f"cards: {said}") from None
