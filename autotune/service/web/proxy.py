"""Behind a proxy: from whom a request comes, under which name and scheme, as that proxy alone may say."""

from __future__ import annotations

import ipaddress
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class BehindProxy:
    """An ASGI middleware."""

    def __init__(self, app: ASGIApp, proxy: Network) -> None:
        """``proxy``: addresses of connections whose ``X-Forwarded-*`` are taken."""
        self._app, self._proxy = app, proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on."""
        if scope["type"] == "http" and scope["client"] and (client := _address(scope["client"][0])):
            scope = {**scope, **_said(scope)} if client in self._proxy else scope
        await self._app(scope, receive, send)


def _said(scope: Scope) -> dict[str, Any]:
    """What the proxy says; of a list the last, for those before may be a client's own."""
    headers = Headers(scope=scope)
    scheme, host, client = (
        ",".join(headers.getlist(f"x-forwarded-{what}")).rpartition(",")[2].strip() for what in ("proto", "host", "for")
    )
    said: dict[str, Any] = {}
    if scheme in ("http", "https"):
        said["scheme"] = scheme
    if host:
        others = [each for each in scope["headers"] if each[0] != b"host"]
        said["headers"] = [*others, (b"host", host.encode("latin-1"))]
    if _address(client):
        said["client"] = (client, 0)
    return said


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An address, that of IPv4 as such also where it comes by IPv6."""
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found
