"""The web page: three static files, and a session in a cookie for this site only."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict, Field

from ..problems import Problem
from .access import COOKIE, Reader, refuse_other_sites

PAGE = APIRouter(include_in_schema=False)
_FILES = Path(__file__).with_name("static")
_TYPES = {"page.js": "text/javascript", "chart.js": "text/javascript", "page.css": "text/css"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


class SessionBody(BaseModel):
    """The token that somebody signs in with."""

    model_config = ConfigDict(extra="forbid")

    token: str = Field(min_length=1, max_length=200)


@PAGE.get("/")
def get_page() -> FileResponse:
    """The page without data, which it requests itself."""
    headers = {"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer"}
    return FileResponse(_FILES / "page.html", media_type="text/html", headers=headers)


@PAGE.get("/static/{name}")
def get_file(name: str) -> FileResponse:
    """Files of the page."""
    if name not in _TYPES:
        raise Problem(404, f"there is no {name[:40]!r}.")
    return FileResponse(_FILES / name, media_type=_TYPES[name], headers={"Cache-Control": "no-cache"})


@PAGE.get("/session")
def get_session(request: Request, caller: Reader) -> dict[str, object]:
    """Who is signed in."""
    return {"name": caller.name, "role": caller.role.name, "by_cookie": COOKIE in request.cookies}


@PAGE.post("/session", status_code=204)
def sign_in(request: Request, body: SessionBody) -> Response:
    """Keep a token in a cookie that no script can read, and that no other site's page sends."""
    refuse_other_sites(request)
    if request.app.state.service.tokens.caller(body.token) is None:
        raise Problem(403, "the token is not known, has expired, or was revoked.")
    response = Response(status_code=204)
    is_secure = request.url.scheme == "https"
    response.set_cookie(COOKIE, body.token, httponly=True, samesite="strict", secure=is_secure, path="/")
    return response


@PAGE.delete("/session", status_code=204)
def sign_out(request: Request) -> Response:
    """Forget the token."""
    refuse_other_sites(request)
    response = Response(status_code=204)
    response.delete_cookie(COOKIE, path="/")
    return response
