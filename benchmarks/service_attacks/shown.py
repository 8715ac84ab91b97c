"""What is shown of what was sent: the log, metrics, the process list, the database, and the page in a browser."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import quote

from tests.chromium import Page, missing

from .callers import kept_archive
from .core import SECRETS, Attack, Scene, attempts

_LINE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ |autotune serves |Its files are in |Tasks run as its own"
)
_FORGED = (
    "\n2026-01-01 00:00:00,000 INFO forged",
    "\r\nforged",
    "\x1b[2Jforged",
    "\u2028forged",
    "\u202eforged",
    "\x9bforged",
    "\0forged",
    "\x7fforged",
    "\x85forged",
    "%0aforged",
)
_SERIES = re.compile(r'^(# (HELP|TYPE) .*|[a-z_]+(\{([a-z]+="[^"\n]*",?)*\})? [-+0-9.eInfNa]+)$')


def _logged(the: Scene, text: str) -> str | None:
    """A path is on one line, and has no letter that does something."""
    mark = f"m{time.monotonic_ns()}"
    the.ask("GET", f"/v1/{mark}{quote(text, safe='')}")
    lines = [line for line in the.main.log.read_bytes().split(b"\n") if mark.encode() in line or b"forged" in line]
    if not lines or not all(mark.encode() in line or b"/v1/m" in line for line in lines):
        return f"{lines[-1:]}"
    return None if all(line.isascii() and line.decode().isprintable() for line in lines) else f"{lines[-1]!r}"


def _logged_method(the: Scene, method: str) -> str | None:
    """A method adds no line of another form, and no series."""
    the.raw(f"{method} /v1/searches HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode("latin-1"))
    text = the.ask("GET", "/metrics", "rita").text
    odd = [line for line in text.splitlines() if not _SERIES.match(line)]
    return f"{odd[:2]}" if odd or 'method="ODD' in text else None


def _only_lines(the: Scene, at: str) -> str | None:
    """All that was sent until now is on lines of the log's own form; none tells of a bug."""
    lines = the.services[at].said().splitlines()
    odd = [line for line in lines if not _LINE.match(line) or "a bug" in line]
    return f"{odd[:3]}" if odd else None


def _no_token(the: Scene, where: str) -> str | None:
    """No token is there, of whichever service, nor what the admin keeps in the environment."""
    secrets = [token.encode() for each in the.services.values() for token in each.tokens.values()]
    secrets += [value.encode() for value in SECRETS.values()]
    found = _content(the, where)
    return f"{sum(each in found for each in secrets)} are there" if any(each in found for each in secrets) else None


_WHERE = ("the log", "the process list", "the database", "the state folder", "metrics", "the description", "the tokens")
_WHERE = (*_WHERE, "searches", "events", "drivers' environments", "drivers' logs")


def _content(the: Scene, where: str) -> bytes:
    services = list(the.services.values())
    match where:
        case "the log":
            return b"".join(each.log.read_bytes() for each in services)
        case "the process list":
            return subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, check=True).stdout
        case "the database":
            return b"".join(path.read_bytes() for each in services for path in each.state.glob("service.db*"))
        case "the state folder":
            files = (path for each in services for path in each.state.rglob("*") if path.is_file())
            return b"".join(path.read_bytes() for path in files if not path.name.endswith((".sqlite", ".db")))
        case "metrics":
            return the.ask("GET", "/metrics", "rita").content
        case "the description":
            return the.ask("GET", "/openapi.json").content
        case "the tokens":
            return the.ask("GET", "/v1/tokens", "eve").content
        case "searches":
            return the.ask("GET", "/v1/searches?limit=500", "eve").content
        case "events":
            return the.ask("GET", f"/v1/searches/{the.victims['main']['RUNNING']}/events", "eve").content
        case "drivers' environments":
            return b"".join(_environments(f"{the.folder}/".encode()))
        case _:
            logs = (path for each in services for path in each.state.glob("searches/*/driver.log") if path.is_file())
            return b"".join(path.read_bytes() for path in logs)


def _environments(mark: bytes) -> Iterator[bytes]:
    """Of all processes of searches of ours, the tasks' among them."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (path / "cmdline").read_bytes() and b"AUTOTUNE_SERVICE_SEARCH=" in (
                found := (path / "environ").read_bytes()
            ):
                yield found
        except OSError:
            continue


def _drivers_are_there(the: Scene, at: str) -> str | None:
    """Else the environments above are nobody's."""
    return None if any(_environments(f"{the.services[at].state}/".encode())) else "no driver"


def _not_in_words(the: Scene, what: str) -> str | None:
    """No refusal repeats the token that it refuses."""
    secret = the.main.tokens["gone"]
    sent = {
        "by header": lambda: the.ask("GET", "/v1/searches", headers={"Authorization": f"Bearer {secret}"}),
        "by cookie": lambda: the.ask("GET", "/v1/searches", headers={"Cookie": f"autotune_token={secret}"}),
        "by sign in": lambda: the.ask("POST", "/session", json={"token": secret}),
        "by sign in with more": lambda: the.ask("POST", "/session", json={"token": secret, "x": 1}),
        "by a path": lambda: the.ask("DELETE", f"/v1/tokens/{secret}", "eve"),
    }
    return "it is" if secret in sent[what]().text else None


_PAYLOADS = {
    "an image": '<img src=x onerror="window.pwned=1">',
    "a script": "<script>window.pwned=1</script>",
    "a drawing": '"><svg onload=window.pwned=1>',
    "the end of an attribute": "' onmouseover='window.pwned=1' x='",
    "a link": "javascript:window.pwned=1",
    "a template": "{{constructor.constructor('window.pwned=1')()}}",
    "the end of a title": "</title><script>window.pwned=1</script>",
    "a frame": '<iframe srcdoc="<script>parent.pwned=1</script>">',
}
HTML_TASK = f"print({' '.join(_PAYLOADS.values())!r}, flush=True)\nraise RuntimeError({_PAYLOADS['an image']!r})\n"
"""It fails in words that are HTML."""


@cache
def _page() -> Page:
    return Page(1280, 900)


def _look(the: Scene, at: str, where: str, wait: str) -> str | None:
    """Nothing of it runs, or becomes an element."""
    page = _page()
    page.complaints.clear()
    page.ask("Page.navigate", url="about:blank")
    page.ask("Page.navigate", url=f"{the.services[at].url}/#token={the.services[at].tokens['eve']}")
    page.until("document.querySelectorAll('.card').length > 0")
    if where:
        page.evaluate(f"location.hash = '#/{where}'")
    page.until(wait)
    is_run = page.evaluate("String(window.pwned)") != "undefined"
    made = page.evaluate("document.querySelectorAll('img[src=x], svg[onload], iframe, [onmouseover]').length")
    scripts = page.evaluate("[...document.scripts].filter(each => each.textContent.includes('pwned')).length")
    links = page.evaluate("[...document.links].filter(each => each.protocol === 'javascript:').length")
    complaints = [each for each in page.complaints if "favicon" not in each]
    return f"{is_run=} {made=} {scripts=} {links=} {complaints}" if is_run or made or scripts or links else None


def _named(the: Scene, payload: str) -> str | None:
    """As a search's name, in the list and on its page."""
    body = {"task": "model.py", "archive": kept_archive(the), "name": payload}
    search_id = the.ask("POST", "/v1/searches", "mallory", json=body).json()["id"]
    shown = f"document.body.textContent.includes({payload!r})"
    said = _look(the, "main", "", shown) or _look(the, "main", search_id, shown)
    the.ask("POST", f"/v1/searches/{search_id}/cancel", "mallory", json={"mode": "now"})
    the.ask("DELETE", f"/v1/searches/{search_id}", "mallory")
    return said


def _failed(the: Scene, where: str) -> str | None:
    """As a task's error, in the list, on its page and in its log."""
    rows = the.ask("GET", "/v1/searches?limit=500", "eve", "tasks").json()
    search_id = next(row["id"] for row in rows if row["name"] == "HTML")
    shown = "document.body.textContent.includes('onerror')"
    return _look(the, "tasks", search_id if where == "its page" else "", shown)


def shown() -> Iterator[Attack]:
    """Nothing that was sent makes a line, a series, or tells a token."""
    yield from attempts(_logged, _FORGED, "a path with {}")
    yield from attempts(_logged_method, ('ODD"} 1', "ODD", "ODD\\", "X" * 1000, 'GET"', "G{T}"), "the method {}")
    yield from attempts(_only_lines, ("main", "private", "near", "far", "tasks"), "the log of {}")
    yield from attempts(_drivers_are_there, ("main",), "drivers of {}")
    yield from attempts(_no_token, _WHERE, "tokens in {}")
    words = ("by header", "by cookie", "by sign in", "by sign in with more", "by a path")
    yield from attempts(_not_in_words, words, "a revoked token {}")


def page() -> Iterator[Attack]:
    """HTML and scripts in what is shown: text, in a browser."""
    if missing():
        return
    yield from attempts(_named, _PAYLOADS, "a name: {}")
    yield from attempts(_failed, ("the list", "its page"), "a task's error, {}")
    yield Attack("the browser ends", lambda the: _page().__exit__(None, None, None))
