"""The HTTP application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import PlainTextResponse
from sqlalchemy.exc import SQLAlchemyError

from ...distribution import VERSION
from ..estimator import Estimator
from ..predictions import Predictions
from ..problems import Problem
from ..service import Service, forget_old
from ..store.database import words_of
from .access import Access, Reader, RefuseStreams
from .answers import answer_problems, refusals
from .following import Reads
from .limits import RequestLimit
from .observe import Metrics, Observe
from .page import PAGE
from .predict import PREDICT
from .proxy import BehindProxy, Network
from .routes import ROUTES, STATUS
from .webhook import Webhook

_MOST_BODY_BYTES = 2**20
_SWEEP_S = 3600.0


def make_app(
    service: Service,
    *,
    keep_s: float | None = None,
    requests_per_s: float | None = None,
    behind: Network | None = None,
    webhook: str | None = None,
) -> FastAPI:
    """The application; searches run as long as it does.

    Args:
        service: what it serves.
        keep_s: searches that ended so many seconds ago are forgotten; None keeps all.
        requests_per_s: the most that one token may ask; None sets no limit.
        behind: the proxy whose word on who asks, by which name and scheme, is taken.
        webhook: the address that is told of each search that ends.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.runner.start()
        works = [] if keep_s is None else [_sweep(service, keep_s)]
        works += [] if webhook is None else [Webhook(service, webhook).run()]
        tasks = [asyncio.create_task(work) for work in works]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        service.close()

    app = FastAPI(
        title="autotune",
        version=VERSION,
        description="Searches for training settings within a memory budget.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        max_body_size=_MOST_BODY_BYTES,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.service = service
    app.state.estimator = Estimator(service.places, service.runner.options)
    app.state.predictions = Predictions(service.database, service.places.predictions)
    app.state.reads = Reads(service.searches)
    app.state.access = Access(service.tokens, None if requests_per_s is None else RequestLimit(requests_per_s))
    metrics = Metrics(service)
    answer_problems(app)
    app.router.routes.append(STATUS)
    app.include_router(ROUTES)
    app.include_router(PREDICT)
    app.include_router(PAGE)

    app.add_middleware(RefuseStreams)
    app.add_middleware(Observe, metrics=metrics)
    if behind is not None:
        app.add_middleware(BehindProxy, proxy=behind)

    @app.get("/healthz", response_class=PlainTextResponse)
    def is_alive() -> str:
        """Whether the process answers."""
        return "alive\n"

    @app.get("/readyz", response_class=PlainTextResponse, responses=refusals(503))
    def is_ready() -> str:
        """Whether the database answers, and can be written, and searches are accepted."""
        service.database.probe()
        if not service.runner.is_alive():
            raise Problem(503, "no searches are taken: the server is starting, or ends.")
        if (shortage := service.places.shortage()) is not None:
            raise Problem(503, shortage)
        return "ready\n"

    @app.get("/metrics", response_class=PlainTextResponse, responses=refusals(401, 403, 429, 503))
    def get_metrics(caller: Reader) -> Response:
        """Metrics for Prometheus."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


async def _sweep(service: Service, keep_s: float) -> None:
    while True:
        try:
            await run_in_threadpool(forget_old, service, keep_s)
        except SQLAlchemyError as reason:
            logging.getLogger("autotune.service").error("the database failed: %s", words_of(reason))
        await asyncio.sleep(_SWEEP_S)
