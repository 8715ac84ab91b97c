"""Refusals and failures as ``application/problem+json`` (RFC 9457)."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import DBAPIError, TimeoutError
from starlette.exceptions import HTTPException

from ..problems import Problem
from ..store.database import Unusable, words_of

_LOG = logging.getLogger("autotune.service")
_TITLES = {
    400: "Bad request",
    401: "Not signed in",
    403: "Not allowed",
    404: "Not found",
    405: "Method not allowed",
    409: "Conflict",
    413: "Too large",
    422: "Cannot be used",
    429: "Too many requests",
    500: "A bug in autotune",
    503: "Not available now",
    507: "No room",
}
_BODY = {
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "What was expected, what was got, and what to do."},
    },
}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Of the interface's description: these statuses are refusals, and their bodies are problems."""
    content = {"application/problem+json": {"schema": _BODY}}
    return {status: {"description": _TITLES[status], "content": content} for status in statuses}


def answer_problems(app: FastAPI) -> None:
    """Answer every refusal and failure in this form."""

    @app.exception_handler(Problem)
    async def refused(request: Request, problem: Problem) -> JSONResponse:
        return answer_of(problem)

    @app.exception_handler(HTTPException)
    async def of_starlette(request: Request, error: HTTPException) -> JSONResponse:
        response = _answer(error.status_code, str(error.detail))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        rows = [{"at": list(map(str, row["loc"])), "message": row["msg"]} for row in error.errors()[:20]]
        said = "; ".join(f"{'.'.join(row['at'])}: {row['message']}" for row in rows)
        return _answer(422, said or "the request cannot be read", errors=rows)

    @app.exception_handler(DBAPIError)
    @app.exception_handler(Unusable)
    @app.exception_handler(TimeoutError)
    async def no_database(request: Request, error: Exception) -> JSONResponse:
        _LOG.error("the database failed: %s", words_of(error))
        said = words_of(error) if isinstance(error, Unusable) else "the database does not answer"
        response = _answer(503, f"{said}. Nothing was done; try again in a moment.")
        response.headers["Retry-After"] = "5"
        return response

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> JSONResponse:
        return _answer(500, "This is a bug in autotune. The server's log has what is known of it.")


def answer_of(problem: Problem) -> JSONResponse:
    """A refusal."""
    response = _answer(problem.status, problem.detail, **problem.more)
    if problem.status == 429:
        response.headers["Retry-After"] = str(problem.more["retry_after"])
    return response


def _answer(status: int, detail: str, **more: Any) -> JSONResponse:
    body = {"type": "about:blank", "title": _TITLES.get(status, "Refused"), "status": status, "detail": detail, **more}
    response = JSONResponse(body, status_code=status, media_type="application/problem+json")
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
