"""The routes below ``/v1``."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.routing import Route

from ...searches.options import Seconds
from ..archives import Limits, receive, unpack
from ..problems import Problem
from ..service import Service
from ..spec import MOST_TRIALS, SearchSpec
from ..store.searches import CancelMode, Search, no_search
from ..store.states import TERMINAL, State
from ..store.tokens import LONGEST_NAME, NAME, Role, RoleName, TokenRow, expiry_s
from .access import Admin, GuardedRoute, Reader, Submitter, let_in, wants_stream
from .answers import refusals
from .following import stream

ROUTES = APIRouter(prefix="/v1", route_class=GuardedRoute, responses=refusals(401, 403, 404, 422, 429, 503))
_MOST_WAIT_S = 60.0
_LONGEST_KEY = 199
"""Characters: with its owner's name before it, it is to fit into its column."""
_NO_NULL = r"^[^\x00]*$"
"""SQLite's LIKE ends there, and finds everything; PostgreSQL refuses it."""
_BINARY = {"type": "string", "format": "binary"}
_TAR = {"content": {"application/octet-stream": {"schema": _BINARY}}}
_BODY = {"requestBody": {"required": True, **_TAR}}

SearchId = Annotated[str, Path(pattern="^[0-9a-f]{16}$")]
Sha256 = Annotated[str, Path(pattern="^[0-9a-f]{64}$")]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CancelBody(_Body):
    """How to cancel."""

    mode: CancelMode = "finish"


class Others(_Body):
    """A search that another waits for."""

    id: str
    name: str
    owner: str


class ResumeBody(_Body):
    """Limits to go on with; None is as before."""

    max_time: Seconds | None = None
    """Time from then on: ``90s``, ``20m`` or ``1.5h``."""
    trials: int | None = Field(default=None, ge=1, le=MOST_TRIALS)
    """Trials in all, with those that were measured before."""


class PriorityBody(_Body):
    """Fields of a search that may be changed."""

    priority: int = Field(ge=0, le=100)


class TokenBody(_Body):
    """A new token."""

    name: str = Field(min_length=1, max_length=LONGEST_NAME, pattern=NAME)
    role: RoleName
    expires: str | None = Field(default="30d", max_length=20)
    """``30d``, ``12h``; None never."""


class NewToken(TokenRow):
    """A new token, shown once."""

    token: str


class Archive(BaseModel):
    """A stored archive."""

    sha256: str
    num_bytes: int
    num_files: int
    unpacked_bytes: int


class EventBody(BaseModel):
    """One event of a search."""

    seq: int
    at: float
    kind: str
    data: dict[str, Any]


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _seen(request: Request, search_id: SearchId, caller: Reader) -> str:
    service = _service(request)
    if service.private and not caller.owns(service.searches.get(search_id).owner):
        raise no_search(search_id)
    return search_id


def _own(request: Request, search_id: SearchId, caller: Submitter) -> str:
    owner = _service(request).searches.get(_seen(request, search_id, caller)).owner
    if not caller.owns(owner):
        raise Problem(
            403, f"search {search_id} is {owner}'s: {owner} and admins change it, and this token is {caller.name}'s."
        )
    return search_id


Seen = Annotated[str, Depends(_seen)]
"""Id of a search that its caller may see."""
Own = Annotated[str, Depends(_own)]
"""Id of a search that its caller may change."""


_ID = {"name": "search_id", "in": "path", "required": True, "schema": {"type": "string", "pattern": "^[0-9a-f]{16}$"}}
_WAIT = {"name": "wait", "in": "query", "schema": {"type": "number", "minimum": 0, "maximum": _MOST_WAIT_S}}
_KNOWN = {"name": "if-none-match", "in": "header", "schema": {"type": "string", "maxLength": 100}}


@ROUTES.get(
    "/searches/{search_id}",
    response_model=Search,
    responses={304: {"description": "It is as it was."}},
    openapi_extra={"parameters": [_ID, _WAIT, _KNOWN], "security": [{"HTTPBearer": []}]},
)
async def get_search(request: Request) -> Response:
    """One search; with ``wait`` seconds, once it has ended if it does meanwhile. The ``ETag`` is another whenever the
    search is."""
    request.scope["route"] = STATUS  # by whose path requests are counted
    caller = await let_in(request, Role.read)
    search_id, wait_s = request.path_params["search_id"], _wait_s(request.query_params.get("wait", "0"))
    if not re.fullmatch("[0-9a-f]{16}", search_id):
        raise Problem(422, "search_id: 16 of 0-9 and a-f were expected.")
    until = asyncio.get_running_loop().time() + wait_s
    while True:
        shown = await request.app.state.reads.get(search_id)
        if _service(request).private and not caller.owns(shown.owner):
            raise no_search(search_id)
        if shown.state in TERMINAL or asyncio.get_running_loop().time() >= until:
            break
        await asyncio.sleep(0.25)
    if request.headers.get("if-none-match") == shown.tag:
        return Response(status_code=304, headers={"ETag": shown.tag})
    return Response(shown.body, media_type="application/json", headers={"ETag": shown.tag})


STATUS = Route("/v1/searches/{search_id}", get_search, methods=["GET"], include_in_schema=False)
"""What is asked for the most, before all other routes and past what FastAPI does for one; ``ROUTES`` describes it."""


def _wait_s(text: str) -> float:
    try:
        if 0 <= (seconds := float(text)) <= _MOST_WAIT_S:
            return seconds
    except ValueError:
        pass
    raise Problem(422, f"wait: seconds from 0 to {_MOST_WAIT_S:g} were expected.")


@ROUTES.put(
    "/archives/{sha256}",
    status_code=201,
    max_body_size=Limits().archive_bytes,
    responses={200: {"model": Archive, "description": "It was here before."}, **refusals(413, 507)},
    openapi_extra=_BODY,
)
async def put_archive(request: Request, response: Response, sha256: Sha256, caller: Submitter) -> Archive:
    """Store the archive of a job's folder: a tar, plain or gzipped, as the raw body."""
    service = _service(request)
    limits, folder = service.places.limits, service.places.archives
    row = await run_in_threadpool(service.find_archive, sha256)
    response.status_code = 201 if row is None else 200
    if row is None or not await run_in_threadpool(service.may_use, caller, sha256):
        part, size = await receive(request.stream(), sha256, folder, limits)
        try:
            if row is None:
                content = await run_in_threadpool(unpack, part, None, limits)
                row = {"sha256": sha256, "num_bytes": size, "num_files": content.num_files}
                row["unpacked_bytes"] = content.num_bytes
                os.replace(part, folder / sha256)
        finally:
            part.unlink(missing_ok=True)
        service.sent.add((caller.name, sha256))
    await run_in_threadpool(service.keep_archive, row)
    return Archive.model_validate(row)


@ROUTES.post(
    "/searches",
    status_code=201,
    responses={200: {"model": Search, "description": "It was submitted before."}, **refusals(400, 413)},
)
def submit(
    request: Request,
    response: Response,
    spec: SearchSpec,
    caller: Submitter,
    idempotency_key: Annotated[str | None, Header(max_length=_LONGEST_KEY, min_length=1)] = None,
) -> Search:
    """Queue a search. A repeated ``Idempotency-Key`` returns the search that it was first used for."""
    service = _service(request)
    service.check_user(caller.name)
    service.check_place(spec, caller)
    home = None if spec.archive is None else service.home
    search, is_new = service.searches.submit(spec, caller.name, idempotency_key, home)
    response.status_code = 201 if is_new else 200
    response.headers["Location"] = f"/v1/searches/{search.id}"
    service.runner.wake()
    return search


@ROUTES.get("/searches", response_model=list[Search])
def list_searches(
    request: Request,
    caller: Reader,
    state: Annotated[list[State] | None, Query(max_length=len(State))] = None,
    owner: Annotated[str | None, Query(max_length=200, pattern=_NO_NULL)] = None,
    name: Annotated[str | None, Query(max_length=200, pattern=_NO_NULL)] = None,
    before: Annotated[int | None, Query(ge=1, le=2**31 - 1)] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
) -> Response:
    """List searches, the newest first, in any of the states, of an owner, with a part of their name; ``before`` is the
    last ``number`` of the previous page."""
    service = _service(request)
    viewer = caller.name if service.private and caller.role < Role.admin else None
    found = service.searches.newest(state or (), before, limit, owner=owner, viewer=viewer, name=name)
    return Response(b"[" + b",".join(each.body for each in found) + b"]", media_type="application/json")


@ROUTES.get("/queue")
def get_queue(request: Request, caller: Reader) -> dict[str, int]:
    """The places in this server's queue by the searches' ids, from 1: in that order they begin as things stand."""
    service = _service(request)
    places = enumerate(service.runner.queue(), start=1)
    return {found: place for place, (found, owner) in places if not service.private or caller.owns(owner)}


@ROUTES.get("/turns")
def get_turns(request: Request, caller: Reader) -> dict[str, list[Others]]:
    """By the id of each search that is worked on here and waits for a device, those whose trials run there; where
    searches are private, one's own alone."""
    service = _service(request)
    waits = service.runner.waits_for()
    found = (service.searches.get(each) for each in {*waits, *itertools.chain(*waits.values())})
    seen = {
        each.id: Others(id=each.id, name=each.name, owner=each.owner)
        for each in found
        if not service.private or caller.owns(each.owner)
    }
    return {each: [seen[other] for other in others if other in seen] for each, others in waits.items() if each in seen}


@ROUTES.get("/searches/{search_id}/archive", responses={200: _TAR})
def get_archive(request: Request, search_id: Own) -> Response:
    """The archive that was submitted, for who may change the search."""
    service = _service(request)
    sha256 = service.searches.get(search_id).spec.archive
    path = service.places.archives / str(sha256)
    if sha256 is None or not path.is_file():
        raise Problem(404, f"the archive of search {search_id} is not here.")
    return FileResponse(path, media_type="application/octet-stream", filename=f"job-{search_id}.tar")


@ROUTES.get(
    "/searches/{search_id}/events",
    response_model=list[EventBody],
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def get_events(
    request: Request,
    search_id: Seen,
    after: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
    last_event_id: Annotated[str | None, Header(max_length=20)] = None,
) -> Response:
    """Events after ``after`` or ``Last-Event-ID``: as they happen if ``text/event-stream`` is accepted, else as JSON
    the first 500 of those so far."""
    service = _service(request)
    if last_event_id is not None:
        if not last_event_id.isascii() or not last_event_id.isdigit():
            raise Problem(422, "Last-Event-ID: the number of an event was expected.")
        after = min(int(last_event_id), 2**31 - 1)
    if wants_stream(request.headers):
        return await stream(request, service, search_id, after)
    events, _ = await run_in_threadpool(service.searches.events, search_id, after)
    return JSONResponse([vars(event) for event in events])


@ROUTES.get("/searches/{search_id}/trials")
def get_trials(
    request: Request,
    search_id: Seen,
    after: Annotated[int, Query(ge=-1, le=2**31 - 1)] = -1,
    limit: Annotated[int, Query(ge=1, le=5000)] = 1000,
) -> list[dict[str, Any]]:
    """The trials' outcomes, by their numbers; 0 is the job as it stands."""
    return _service(request).searches.trials(search_id, after, limit)


@ROUTES.get("/searches/{search_id}/trials/{number}/log", response_class=PlainTextResponse)
def get_trial_log(request: Request, search_id: Seen, number: Annotated[int, Path(ge=0, le=10**6)]) -> str:
    """The output of a trial, if there is any."""
    service = _service(request)
    study = service.searches.get(search_id).summary.get("study")
    text = isinstance(study, str) and service.places.search(search_id).read_trial_log(study, number)
    if not text:
        raise Problem(404, f"nothing is kept of what trial {number} printed.")
    return str(text)


@ROUTES.get("/searches/{search_id}/log", response_class=PlainTextResponse)
def get_log(request: Request, search_id: Seen) -> str:
    """The end of the output of the search's drivers."""
    service = _service(request)
    search, folder = service.searches.get(search_id), service.places.search(search_id)
    if search.attempt and not folder.path.is_dir():
        raise Problem(404, f"the files of search {search_id} are with the server that runs it.")
    return folder.read_log()


class _Yaml(PlainTextResponse):
    media_type = "application/yaml"


@ROUTES.get(
    "/searches/{search_id}/plan",
    response_class=_Yaml,
    responses={200: {"content": {"application/yaml": {"schema": {"type": "object"}}}}, **refusals(409)},
)
def get_plan(request: Request, search_id: Seen) -> Response:
    """The plan as YAML, which jobs apply."""
    text = _service(request).searches.document(search_id, "plan")
    return _Yaml(text, headers={"Content-Disposition": f'attachment; filename="plan-{search_id}.yaml"'})


@ROUTES.get("/searches/{search_id}/files", responses=refusals(409))
def get_files(request: Request, search_id: Seen) -> dict[str, str]:
    """The files that belong beside the plan, by name, in base64; only plans with pruning or weights have any."""
    found: dict[str, str] = json.loads(_service(request).searches.document(search_id, "plan_files"))
    return found


@ROUTES.get("/searches/{search_id}/report", response_class=PlainTextResponse, responses=refusals(409))
def get_report(request: Request, search_id: Seen) -> str:
    """The plan in words."""
    return _service(request).searches.document(search_id, "report")


@ROUTES.post("/searches/{search_id}/cancel", status_code=202, responses=refusals(400, 413))
def cancel(request: Request, search_id: Own, body: CancelBody) -> Search:
    """End a search: ``finish`` ends the running trials and makes the best so far its plan; ``now`` ends it at once."""
    search = _service(request).searches.cancel(search_id, body.mode)
    _service(request).runner.wake()
    return search


@ROUTES.patch("/searches/{search_id}", responses=refusals(400, 409, 413))
def change(request: Request, search_id: Own, body: PriorityBody) -> Search:
    """Change the priority."""
    return _service(request).searches.set_priority(search_id, body.priority)


@ROUTES.post("/searches/{search_id}/resume", status_code=202, responses=refusals(400, 409, 413))
def resume(request: Request, search_id: Own, body: ResumeBody | None = None) -> Search:
    """Resume a search that was cancelled or failed, from what was measured; with other limits where they are given."""
    given = {} if body is None else {name: value for name, value in body if value is not None}
    service = _service(request)
    service.check_user(service.searches.get(search_id).owner)
    search = service.searches.resume(search_id, given)
    service.runner.wake()
    return search


@ROUTES.delete("/searches/{search_id}", status_code=204, responses=refusals(409))
def delete(request: Request, search_id: Own) -> None:
    """Delete a search that has ended, with its files."""
    _service(request).delete(search_id)


@ROUTES.get("/tokens")
def list_tokens(request: Request, caller: Admin) -> list[TokenRow]:
    """List the tokens, without their secrets."""
    return _service(request).tokens.all()


@ROUTES.post("/tokens", status_code=201, responses=refusals(400, 409, 413))
def create_token(request: Request, caller: Admin, body: TokenBody) -> NewToken:
    """Make a token; it is shown only once."""
    row, secret = _service(request).tokens.create(body.name, body.role, expiry_s(body.expires))
    request.app.state.access.forget()
    return NewToken(token=secret, **row.model_dump())


@ROUTES.delete("/tokens/{token_id}", status_code=204)
def revoke_token(request: Request, token_id: Annotated[str, Path(pattern="^[0-9a-f]{8}$")], caller: Admin) -> None:
    """Revoke a token."""
    _service(request).tokens.revoke(token_id)
    request.app.state.access.forget()
