"""From where: other sites' pages, other names of the host, what only a proxy may say."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from .callers import CHANGES
from .core import Attack, Scene, attempts, bound, expect

_ORIGINS = {
    "another": "http://evil.example",
    "none that a browser names": "null",
    "empty": "",
    "https in place of http": "https://127.0.0.1:{port}",
    "another port": "http://127.0.0.1:1",
    "no port": "http://127.0.0.1",
    "ours as a user's name": "http://127.0.0.1:{port}@evil.example",
    "ours as a beginning": "http://127.0.0.1:{port}.evil.example",
    "ours as an end": "http://evil.127.0.0.1:{port}",
    "another name of this machine": "http://localhost:{port}",
    "a file": "file://",
}
_CHANGES: tuple[tuple[str, str, Any], ...] = (
    *((method, f"/v1/searches/{{id}}{what}", body) for method, what, body in CHANGES if body != {}),
    ("POST", "/v1/searches", {"task": "model.py"}),
    ("PUT", "/v1/archives/" + "0" * 64, {}),
    ("POST", "/v1/tokens", {"name": "mallory 3", "role": "admin"}),
)


def _by_cookie(the: Scene, change: tuple[str, str, Any], headers: dict[str, str], at: str = "main") -> str | None:
    """A browser that is signed in as an admin, on another site's page."""
    method, path, body = change
    port = str(the.services[at].port)
    sent = {name: value.replace("{port}", port) for name, value in headers.items()}
    sent["Cookie"] = f"autotune_token={the.services[at].tokens['eve']}"
    victim = the.victims.get(at, {}).get("QUEUED", "0" * 16)
    return expect(the.ask(method, path.format(id=victim), at=at, headers=sent, json=body), 403)


def _no_cors(the: Scene, change: tuple[str, str, Any], method: str) -> str | None:
    """No other origin is told that it may ask, or read."""
    headers = {
        "Origin": "http://evil.example",
        "Access-Control-Request-Method": change[0],
        "Access-Control-Request-Headers": "authorization",
        "Cookie": f"autotune_token={the.main.tokens['eve']}",
    }
    answer = the.ask(method, change[1].format(id=the.victims["main"]["QUEUED"]), headers=headers)
    told = [name for name in answer.headers if name.lower().startswith("access-control-")]
    return f"{told}" if told else None


def _sign_in(the: Scene, headers: dict[str, str]) -> str | None:
    """Somebody else's page signs nobody in, or out."""
    for method, body in (("POST", {"token": the.main.tokens["eve"]}), ("DELETE", None)):
        sent = {name: value.replace("{port}", str(the.main.port)) for name, value in headers.items()}
        answer = the.ask(method, "/session", headers=sent, json=body)
        if said := expect(answer, 403):
            return said
        if "set-cookie" in answer.headers:
            return "a cookie is set"
    return None


def _simple(the: Scene, kind: str) -> str | None:
    """A form, which needs no preflight."""
    headers = {
        "Cookie": f"autotune_token={the.main.tokens['eve']}",
        "Content-Type": kind,
        "Origin": "http://evil.example",
    }
    path = f"/v1/searches/{the.victims['main']['QUEUED']}/cancel"
    return expect(the.ask("POST", path, headers=headers, content=b'{"mode": "now"}'), 403)


def _cookie(the: Scene, word: str) -> str | None:
    own = {"Origin": the.main.url, "Sec-Fetch-Site": "same-origin"}
    answer = the.ask("POST", "/session", headers=own, json={"token": the.main.tokens["rita"]})
    said = answer.headers.get("set-cookie", "")
    return None if word in said else f"no {word}: {said.partition('=')[0]}"


def _framed(the: Scene, path: str) -> str | None:
    policy = the.ask("GET", path).headers.get("content-security-policy", "")
    missing = [each for each in ("frame-ancestors 'none'", "default-src 'none'") if each not in policy]
    return f"no {missing}" if missing or "unsafe" in policy else None


def other_sites() -> Iterator[Attack]:
    """By the page's cookie, from other sites' pages: 403, and no other origin may read."""
    for name, origin in _ORIGINS.items():
        for change in _CHANGES:
            yield Attack(
                f"origin {name}: {change[0]} {change[1]} {change[2]}",
                bound(_by_cookie, change=change, headers={"Origin": origin}),
            )
        yield from attempts(_sign_in, {name: {"Origin": origin}}, "sign in and out, origin {}")
    for site in ("cross-site", "same-site", "odd"):
        for change in _CHANGES[:4]:
            yield Attack(
                f"{site}: {change[0]} {change[1]} {change[2]}",
                bound(_by_cookie, change=change, headers={"Sec-Fetch-Site": site}),
            )
    for change in _CHANGES:
        for method in dict.fromkeys((change[0], "OPTIONS", "GET")):
            yield Attack(f"CORS: {method} for {change}", bound(_no_cors, change=change, method=method))
    forms = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/json")
    yield from attempts(_simple, forms, "a form of {}")
    yield from attempts(_cookie, ("HttpOnly", "SameSite=strict", "Path=/"), "the cookie is {}")
    yield from attempts(_framed, ("/", "/healthz", "/openapi.json", "/v1/searches"), "in a frame: {}")


_HOSTS = ("127.0.0.1", "localhost", "evil.example", "[::1]", "127.0.0.1:8470", "0", "x" * 255, "a b", "::", "")
_SAID = {
    "X-Forwarded-For": "127.0.0.1",
    "X-Forwarded-Host": "127.0.0.1",
    "X-Forwarded-Proto": "https",
    "Forwarded": "for=127.0.0.1;host=127.0.0.1;proto=https",
    "X-Real-IP": "127.0.0.1",
    "CF-Connecting-IP": "127.0.0.1",
    "True-Client-IP": "127.0.0.1",
    "X-Client-IP": "127.0.0.1",
    "X-Original-URL": "/healthz",
    "X-Rewrite-URL": "/healthz",
    "Via": "1.1 localhost",
}


def _nobody(the: Scene, at: str, headers: dict[str, str]) -> str | None:
    """Who has no token stays who has none."""
    for method, path, body in (
        ("GET", "/v1/searches", None),
        ("POST", "/v1/tokens", {"name": "mallory 4", "role": "admin"}),
        ("PUT", "/v1/archives/" + "0" * 64, None),
    ):
        if said := expect(the.ask(method, path, at=at, headers=headers, json=body), 400, 401):
            return f"{method} {path}: {said}"
    return None


def _far_proxy(the: Scene, headers: dict[str, str]) -> str | None:
    """A client that is not the proxy makes no other origin ours by what it says."""
    change = ("POST", "/v1/tokens", {"name": "mallory 5", "role": "admin"})
    return _by_cookie(the, change, {"Origin": "https://evil.example", "Host": "127.0.0.1", **headers}, "far")


def _in_log(the: Scene, said: str) -> str | None:
    """A client has no other address in the log by what it says; behind a proxy the last one, which is its word."""
    path = f"/v1/seen-{time.monotonic_ns()}"
    the.ask("GET", path, at="far", headers={"X-Forwarded-For": said})
    the.ask("GET", path, at="near", headers={"X-Forwarded-For": f"{said}, 203.0.113.9"})
    for at, address in (("far", "127.0.0.1"), ("near", "203.0.113.9")):
        line = next((each for each in the.services[at].said().splitlines() if path in each), "")
        if f" {address} GET {path}" not in line:
            return f"{at}: {line}"
    return None


def hosts() -> Iterator[Attack]:
    """Other Hosts, and what only a proxy may say: nobody is let in, and no origin becomes ours."""
    for at in ("main", "near", "far"):
        for host in _HOSTS:
            yield Attack(f"{at}: Host {host!r}"[:80], bound(_nobody, at=at, headers={"Host": host}))
        for name, value in _SAID.items():
            yield Attack(f"{at}: {name} {value}", bound(_nobody, at=at, headers={name: value}))
    yield from attempts(
        _far_proxy,
        (
            {"X-Forwarded-Host": "evil.example", "X-Forwarded-Proto": "https"},
            {"X-Forwarded-Host": "evil.example, evil.example", "X-Forwarded-Proto": "https, https"},
            {"X-Forwarded-Host": "evil.example", "X-Forwarded-Proto": "https", "X-Forwarded-For": "10.9.9.9"},
            {"Forwarded": "host=evil.example;proto=https"},
        ),
        "no proxy says {}",
    )
    yield from attempts(
        _in_log,
        ("198.51.100.1", "127.0.0.2, 10.9.9.9", "unknown", "a\tb", "198.51.100.1 GET /x 200", "x" * 2000),
        "X-Forwarded-For {}",
    )
