"""How it is sent: requests within requests, heads and bodies without end, and what does not come."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

from .core import Attack, Scene, attempts, bound, statuses

_HIDDEN = "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
_POST = "POST /v1/searches HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n"
_CHUNKED = "Transfer-Encoding: chunked\r\n"


def _framed(head: str, body: str = "") -> str:
    return f"{_POST}{head}\r\n{body}{_HIDDEN}"


_WITHIN = {
    "length and chunks": _framed(f"Content-Length: 4\r\n{_CHUNKED}", "0\r\n\r\n"),
    "chunks and length": _framed(f"{_CHUNKED}Content-Length: 4\r\n", "0\r\n\r\n"),
    "two lengths": _framed("Content-Length: 0\r\nContent-Length: 39\r\n"),
    "two lengths in one": _framed("Content-Length: 0, 39\r\n"),
    "a length below nothing": _framed("Content-Length: -1\r\n"),
    "a length with a sign": _framed("Content-Length: +0\r\n"),
    "a length in hex": _framed("Content-Length: 0x0\r\n"),
    "a length with a space": _framed("Content-Length: 0 9\r\n"),
    "a length of many digits": _framed("Content-Length: 99999999999999999999999999\r\n"),
    "a name before a space": _framed("Content-Length : 0\r\n"),
    "chunks before a space": _framed("Transfer-Encoding : chunked\r\nContent-Length: 0\r\n"),
    "chunks after a tab": _framed("Transfer-Encoding:\tchunked\r\nContent-Length: 3\r\n", "0\r\n\r\n"),
    "chunks twice": _framed("Transfer-Encoding: chunked, chunked\r\n", "0\r\n\r\n"),
    "chunks that are none": _framed("Transfer-Encoding: xchunked\r\nContent-Length: 0\r\n"),
    "chunks, then identity": _framed("Transfer-Encoding: chunked, identity\r\n", "0\r\n\r\n"),
    "a folded line": _framed("X: a\r\n Content-Length: 0\r\nContent-Length: 39\r\n"),
    "a folded length": _framed("Content-Length:\r\n 0\r\n"),
    "a bare CR": _framed("X: a\rContent-Length: 0\r\nContent-Length: 39\r\n"),
    "a null in a value": _framed("X: a\0b\r\nContent-Length: 0\r\n"),
    "a null in a name": _framed("X\0: a\r\nContent-Length: 0\r\n"),
    "a space in a name": _framed("X Y: a\r\nContent-Length: 0\r\n"),
    "no colon": _framed("Content-Length 0\r\n"),
    "an empty name": _framed(": a\r\nContent-Length: 0\r\n"),
    "a chunk's size below nothing": _framed(_CHUNKED, "-1\r\n"),
    "a chunk's size beyond all": _framed(_CHUNKED, "fffffffffffffffff\r\n"),
    "a chunk's size in words": _framed(_CHUNKED, "zero\r\n\r\n"),
    "a chunk's size with 0x": _framed(_CHUNKED, "0x0\r\n\r\n"),
    "a chunk without its end": _framed(_CHUNKED, "1\r\nxx0\r\n\r\n"),
    "a chunk's size and a bare line feed": _framed(_CHUNKED, "1\nx\r\n0\r\n\r\n"),
}
"""Framings of which two readers could make two things: what is behind them is no request."""
_NO_HTTP = {
    "HTTP/0.9": "GET /v1/tokens\r\n\r\n",
    "HTTP/2 at once": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/3": "GET /v1/tokens HTTP/3.0\r\n\r\n",
    "HTTP/1.2": "GET /v1/tokens HTTP/1.2\r\nHost: x\r\n\r\n",
    "a version in words": "GET /v1/tokens HTTP/x\r\n\r\n",
    "no version": "GET /v1/tokens \r\nHost: x\r\n\r\n",
    "no path": "GET  HTTP/1.1\r\nHost: x\r\n\r\n",
    "a space in the path": "GET /v1/tokens x HTTP/1.1\r\nHost: x\r\n\r\n",
    "a method in small letters": "get /v1/tokens HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": "\x16\x03\x01\x02\x00\x01\x00",
    "SSH": "SSH-2.0-OpenSSH_9.0\r\n\r\n",
    "a tunnel": "CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    "another's URL": "GET http://evil.example/v1/tokens HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "a web socket": "GET /v1/searches HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
    "HTTP/2 by upgrade": "GET /v1/searches HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    "Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
    "letters beyond ASCII": "GET /\u00e9 HTTP/1.1\r\nHost: x\r\nX: \u00ff\r\nConnection: close\r\n\r\n",
    "a proxy's protocol": "PROXY TCP4 127.0.0.1 127.0.0.1 1 2\r\nGET /v1/tokens HTTP/1.1\r\nHost: x\r\n\r\n",
}


def _within(the: Scene, text: str) -> str | None:
    data = text.replace("{token}", the.main.tokens["rita"]).encode("latin-1")
    answer = the.raw(data, quiet_s=0.4)
    found = statuses(answer)
    if b"alive" in answer:
        return f"the hidden request is answered: {found}"
    return None if all(400 <= each < 500 for each in found) else f"{found}"


def _no_http(the: Scene, text: str) -> str | None:
    found = statuses(the.raw(text.encode("latin-1"), quiet_s=0.4))
    return None if all(400 <= each < 500 for each in found) else f"{found}"


def _behind(the: Scene, first: str) -> str | None:
    """What comes behind a request of somebody with a token, on one connection, is asked by nobody."""
    secret = the.main.tokens["eve"]
    known = f"Host: x\r\nAuthorization: Bearer {secret}\r\n"
    data = f"{first} HTTP/1.1\r\n{known}\r\nGET /v1/tokens HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    found = statuses(the.raw(data.encode()))
    return None if found[-1:] == [401] and len(found) == 2 else f"{found}"


def smuggling() -> Iterator[Attack]:
    """Two readings of one request: refused, and what is hidden behind it is not answered."""
    yield from attempts(_within, _WITHIN)
    yield from attempts(_no_http, _NO_HTTP)
    yield from attempts(_behind, ("GET /v1/tokens", "GET /v1/searches", "GET /metrics", "GET /none"), "behind {}")


_HEADS = {
    "a header of 1 MiB": f"X: {'x' * 2**20}\r\n",
    "10,000 headers": "".join(f"X-{n}: {n}\r\n" for n in range(10_000)),
    "100,000 short headers": "X: 1\r\n" * 100_000,
    "a name of 1 MiB": f"{'x' * 2**20}: 1\r\n",
    "a cookie of 1 MiB": f"Cookie: autotune_token={'x' * 2**20}\r\n",
    "a token of 1 MiB": f"Authorization: Bearer {'x' * 2**20}\r\n",
    "spaces without end": f"X:{' ' * 2**20}1\r\n",
    "a Host of 1 MiB": f"Host: {'x' * 2**20}\r\n",
}


def _head(the: Scene, text: str) -> str | None:
    found = statuses(the.raw(f"GET /v1/searches HTTP/1.1\r\nHost: x\r\n{text}\r\n".encode()))
    return None if set(found) <= {400, 401, 431} else f"{found}"


def _line(the: Scene, path: str) -> str | None:
    found = statuses(the.raw(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()))
    return None if set(found) <= {400, 404, 414} else f"{found}"


_MOST_SENT = 48 * 2**20
_MOST_TAKEN = 16 * 2**20
"""What the system keeps of a connection, and more."""


def _poured(the: Scene, what: str, who: str, claims: str) -> str | None:
    """A body that is refused is not read to its end."""
    secret = the.main.tokens.get(who, "atn_none")
    head = f"{what} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\r\nContent-Type: application/json\r\n"
    frame = "Transfer-Encoding: chunked" if claims == "chunks" else f"Content-Length: {claims}"
    sent = 0
    block = b"x" * 2**16
    block = b"10000\r\n" + block + b"\r\n" if claims == "chunks" else block
    with socket.create_connection(("127.0.0.1", the.main.port), 10) as connection:
        connection.settimeout(3)
        try:
            connection.sendall(f"{head}{frame}\r\n\r\n".encode())
            while sent < _MOST_SENT:
                connection.sendall(block)
                sent += len(block)
        except OSError:
            pass
    return None if sent < _MOST_TAKEN else f"{sent / 2**20:.0f} MiB were taken"


def _claimed(the: Scene, what: str) -> str | None:
    """A length that is beyond all is refused before anything comes."""
    head = f"{what} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {the.main.tokens['mallory']}\r\n"
    found = statuses(the.raw(f"{head}Content-Length: {2**40}\r\n\r\n".encode()))
    return None if found == [413] else f"{found}"


def sizes() -> Iterator[Attack]:
    """Heads, lines and bodies without end: refused, and read no further."""
    yield from attempts(_head, _HEADS)
    long = ("/" + "x" * 2**17, "/v1/searches?" + "a=1&" * 2**15, "/v1/searches/" + "%41" * 2**15, "/" * 2**17)
    yield from attempts(_line, {f"a line, {path[:14]}": path for path in long})
    bodies = ("POST /v1/searches", "PUT /v1/archives/" + "0" * 64, "POST /session", "POST /v1/tokens", "POST /none")
    for what in bodies:
        for who in ("nobody", "rita"):
            for claims in (str(2**30), "chunks"):
                yield Attack(f"{what} by {who}, {claims}", bound(_poured, what=what, who=who, claims=claims))
    claimed = ("POST /v1/searches", "PUT /v1/archives/" + "0" * 64, f"POST /v1/searches/{'0' * 16}/cancel")
    yield from attempts(_claimed, claimed, "{} of 1 TiB")


_HEAD_S = 14.0
"""The product waits 10 s for a head."""
_BODY_S = 66.0
"""And 60 s for the next bytes of a body."""


def _waits(the: Scene, begin: str, each: str, longest_s: float) -> str | None:
    """The connection is closed, whatever drips."""
    begin = begin.replace("{token}", the.main.tokens["mallory"])
    with socket.create_connection(("127.0.0.1", the.main.port), 10) as connection:
        began = time.monotonic()
        connection.settimeout(1)
        connection.sendall(begin.encode())
        while (took := time.monotonic() - began) < longest_s:
            try:
                if each:
                    connection.sendall(each.encode())
                if not connection.recv(2**16):
                    return None
            except TimeoutError:
                pass
            except OSError:
                return None
    return f"open after {took:.0f} s"


_SLOW: dict[str, tuple[str, str, float]] = {
    "nothing": ("", "", _HEAD_S),
    "half a line": ("GET /v1/sea", "", _HEAD_S),
    "half a head": ("GET /v1/searches HTTP/1.1\r\nHost: x\r\n", "", _HEAD_S),
    "a header a second": ("GET /v1/searches HTTP/1.1\r\n", "X: 1\r\n", _HEAD_S),
    "a letter a second": ("GET /v1/searches HTTP/1.1\r\nX: ", "x", _HEAD_S),
    "blank lines": ("\r\n", "\r\n", _HEAD_S),
    "half of the next head": ("GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /", "", _HEAD_S),
    "a body that does not come": (f"{_POST}Content-Length: 9\r\n\r\n", "", _BODY_S),
    "a body that does not go on": (f"{_POST}Content-Length: 9\r\n\r\n1", "", _BODY_S),
    "a chunk that does not go on": (f"{_POST}{_CHUNKED}\r\n9\r\n1", "", _BODY_S),
    "a body of nobody's": ("POST /v1/searches HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1", "", _BODY_S),
}


def slow() -> Iterator[Attack]:
    """What does not come is not waited for."""
    for name, (begin, each, longest_s) in _SLOW.items():
        yield Attack(name, bound(_waits, begin=begin, each=each, longest_s=longest_s))


def _held(the: Scene, sent: str) -> str | None:
    """Three hundred connections of strangers, and others are answered at once."""
    data = sent.replace("{token}", "atn_none").encode()
    with ExitStack() as held:
        for _ in range(300):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", the.services["far"].port), 10))
            with suppress(OSError):
                connection.sendall(data)
        began = time.monotonic()
        answer = the.ask("GET", "/v1/searches", "rita", "far")
        took = time.monotonic() - began
    return None if answer.status_code == 200 and took < 2 else f"{answer.status_code} after {took:.1f} s"


def _streams(the: Scene, who: str) -> str | None:
    """A token has a hundred streams; others have theirs."""
    path = f"/v1/searches/{the.victims['main']['RUNNING']}/events"
    head = f"GET {path} HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\nAuthorization: Bearer "
    found = []
    with ExitStack() as held:
        for _ in range(130):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", the.main.port), 10))
            connection.settimeout(10)
            connection.sendall(f"{head}{the.main.tokens[who]}\r\n\r\n".encode())
            found += statuses(connection.recv(2**12))
        others = the.ask("GET", "/v1/searches", "ann").status_code
    counted = {status: found.count(status) for status in dict.fromkeys(found)}
    return None if counted == {200: 100, 429: 30} and others == 200 else f"{counted}, others {others}"


def _asked_often(the: Scene, who: str) -> str | None:
    """Two hundred requests on one connection, one behind the other."""
    one = f"GET /v1/searches?limit=1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {the.main.tokens[who]}\r\n\r\n"
    found = statuses(the.raw(one.encode() * 200, quiet_s=2.0))
    return None if found == [200] * 200 else f"{len(found)} answers: {set(found)}"


def floods() -> Iterator[Attack]:
    """Many at once: others are answered."""
    yield from attempts(
        _held, {"silent": "", "half a head": "GET / HTTP/1.1\r\n", "half a body": f"{_POST}Content-Length: 9\r\n\r\n"}
    )
    yield from attempts(_streams, ("rita", "mallory"), "130 streams of {}")
    yield from attempts(_asked_often, ("rita",), "200 requests at once by {}")
