"""``POST /v1/predict``: what a job takes on types of cards, for schedulers that ask before they place it."""

from __future__ import annotations

from typing import Annotated, Self

from fastapi import APIRouter, Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt, model_validator

from ...errors import UserError
from ...estimates.cards import find_cards, option_name
from ...searches.options import HostBudgetOption
from ..estimator import Estimator
from ..predictions import Known, Predicted, Predictions
from ..problems import Problem
from ..service import Service
from ..spec import inside
from .access import GuardedRoute, Submitter
from .answers import refusals

PREDICT = APIRouter(prefix="/v1", route_class=GuardedRoute, responses=refusals(400, 401, 403, 413, 422, 429, 503, 507))

_CardName = Annotated[str, Field(min_length=1, max_length=60)]


class PredictBody(BaseModel):
    """A job, and where it may run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fingerprint: str | None = Field(default=None, pattern="^sha256:[0-9a-f]{64}$")
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
    try:
        cards = find_cards(",".join(body.cards))
    except UserError as error:
        said = str(error).removeprefix("--card: ").partition(" `--card all`")[0]
        raise Problem(422, f"cards: {said}") from None
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
