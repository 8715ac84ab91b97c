"""Authorizes requests: by a bearer token, or by the page's cookie."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..problems import Problem
from ..store.tokens import Caller, Role, Tokens
from .answers import answer_of
from .limits import RequestLimit, StreamLimit

COOKIE = "autotune_token"
_SAFE = ("GET", "HEAD", "OPTIONS")
_KNOWN_S = 1.0
"""Seconds for which a look-up of tokens is cached: changes by another process take effect after that."""
_MOST_KNOWN = 1024


@dataclass(frozen=True)
class Access:
    """Authorizes requests."""

    tokens: Tokens
    limit: RequestLimit | None = None
    streams: StreamLimit = field(default_factory=StreamLimit)
    _known_until: dict[str, tuple[float, Caller]] = field(default_factory=dict, repr=False)

    async def find(self, request: Request) -> Caller:
        """:meth:`caller`, cached for a moment.

        Raises:
            Problem: 401; 403; 429.
        """
        key = _key(request.headers)
        known = self._known_until.get(key)
        if known is not None and time.monotonic() < known[0]:
            caller = known[1]
            if not request.headers.get("authorization", "").lower().startswith("bearer "):
                refuse_other_sites(request)
        else:
            caller = await run_in_threadpool(self.caller, request)
            if len(self._known_until) > _MOST_KNOWN:
                self._known_until.clear()
            self._known_until[key] = time.monotonic() + _KNOWN_S, caller
        if self.limit is not None:
            self.limit.take(caller.token_id)
        return caller

    def refused_stream(self, headers: Headers) -> Problem | None:
        """Why who sends these gets no event stream; None where that is not known without a look at the tokens."""
        known = self._known_until.get(_key(headers))
        return None if known is None else self.streams.refusal(known[1].token_id)

    def forget(self) -> None:
        """Clear the cache, since tokens have changed."""
        self._known_until.clear()

    def caller(self, request: Request) -> Caller:
        """Who makes a request.

        Raises:
            Problem: 401, nobody known; 403, another site's page asks.
        """
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and secret:
            return self._known(secret.strip())
        refuse_other_sites(request)
        if cookie := request.cookies.get(COOKIE):
            return self._known(cookie)
        raise Problem(
            401,
            "a token was expected: AUTOTUNE_TOKEN or Authorization: Bearer atn_…. `autotune serve` prints one "
            "as it starts where there is none; `autotune serve token create` makes more.",
        )

    def _known(self, secret: str) -> Caller:
        found = self.tokens.caller(secret)
        if found is None:
            raise Problem(401, "the token is not known, has expired, or was revoked.")
        return found


class RefuseStreams:
    """An ASGI middleware. A token that has all the event streams that it may have is refused another one here, before
    the route is found and the search is read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on, or refuse it."""
        if scope["type"] == "http" and wants_stream(headers := Headers(scope=scope)):
            refusal = scope["app"].state.access.refused_stream(headers)
            if refusal is not None:
                await answer_of(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def wants_stream(headers: Headers) -> bool:
    """Whether server-sent events are asked for."""
    return "text/event-stream" in headers.get("accept", "")


def _key(headers: Headers) -> str:
    parts = [headers.get(name, "") for name in ("authorization", "cookie")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def refuse_other_sites(request: Request) -> None:
    """Refuse requests by cookie that do not come from our own page."""
    if request.method in _SAFE:
        return
    origin = request.headers.get("origin")
    site = request.headers.get("sec-fetch-site", "same-origin")
    is_ours = origin is None or origin == f"{request.url.scheme}://{request.headers.get('host')}"
    if site not in ("same-origin", "none") or not is_ours:
        raise Problem(
            403,
            "this request comes from another site's page. If it is this one's, a proxy has changed the name or scheme: "
            "start the service with --behind-proxy ADDRESS, and let the proxy send X-Forwarded-Host and -Proto.",
        )


async def let_in(request: Request, role: Role) -> Caller:
    """Who asks, where they may; their connection is one of those that are kept.

    Raises:
        Problem: 401; 403; 429.
    """
    access: Access = request.app.state.access
    caller: Caller | None = getattr(request.state, "caller", None)
    if caller is None:
        request.state.caller = caller = await access.find(request)
        if (connection := getattr(request.state, "connection", None)) is not None:
            connection.let_in()
    if caller.role < role:
        raise Problem(403, f"the role {role.name} is needed, and this token has the role {caller.role.name}.")
    return caller


class GuardedRoute(APIRoute):
    """Of who has no token, no body is read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's own, which reads the body first."""
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            await let_in(request, Role.read)
            return await handle(request)

        return guarded


def _at_least(role: Role) -> Callable[..., Awaitable[Caller]]:
    async def check(request: Request, _: Annotated[object, Depends(HTTPBearer(auto_error=False))]) -> Caller:
        return await let_in(request, role)

    return check


Reader = Annotated[Caller, Depends(_at_least(Role.read))]
Submitter = Annotated[Caller, Depends(_at_least(Role.submit))]
Admin = Annotated[Caller, Depends(_at_least(Role.admin))]
