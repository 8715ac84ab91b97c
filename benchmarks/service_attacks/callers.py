"""Who asks: nobody, with a false token, with too small a role, for what is another's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from .core import Attack, Scene, attempts, bound, expect, job

_ID = "{id}"
ROUTES: dict[tuple[str, str], str] = {
    ("GET", "/v1/searches"): "read",
    **{("GET", f"/v1/searches/{_ID}{what}"): "read" for what in ("", "/events", "/trials", "/trials/0/log", "/log")},
    **{("GET", f"/v1/searches/{_ID}{what}"): "read" for what in ("/plan", "/report", "/files")},
    ("GET", "/v1/queue"): "read",
    ("GET", f"/v1/searches/{_ID}/archive"): "submit",
    ("GET", "/metrics"): "read",
    ("GET", "/session"): "read",
    ("PUT", "/v1/archives/" + "0" * 64): "submit",
    ("POST", "/v1/searches"): "submit",
    ("POST", f"/v1/searches/{_ID}/cancel"): "submit",
    ("POST", f"/v1/searches/{_ID}/resume"): "submit",
    ("PATCH", f"/v1/searches/{_ID}"): "submit",
    ("DELETE", f"/v1/searches/{_ID}"): "submit",
    ("GET", "/v1/tokens"): "admin",
    ("POST", "/v1/tokens"): "admin",
    ("DELETE", "/v1/tokens/01234567"): "admin",
}
"""What each asks for; ``{id}`` is a victim's."""
_FALSE = (
    *("none", "an empty one", "an unknown one", "a valid one but for its end", "in capitals", "with a letter more"),
    *("its hash", "its first half", "as Basic", "as Digest", "in the query", "in X-Api-Key", "as a proxy's"),
    *("in a cookie of another name", "a false cookie", "expired", "revoked", "of another service"),
)
CHANGES: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/cancel", {"mode": "now"}),
    ("POST", "/cancel", {"mode": "finish"}),
    ("POST", "/cancel", {}),
    ("PATCH", "", {"priority": 0}),
    ("POST", "/resume", None),
    ("POST", "/resume", {"trials": 9000, "max_time": "9h"}),
    ("DELETE", "", None),
)
READS = ("", "/events", "/trials", "/trials/0/log", "/log", "/plan", "/report", "/files", "/archive")


def _sent(the: Scene, how: str) -> tuple[dict[str, str], str]:
    """Headers and query of a token that is none."""
    tokens = the.main.tokens
    own = tokens["eve"]
    swapped = own[:-1] + ("A" if own[-1] != "A" else "B")
    bearers = {
        "an empty one": "Bearer",
        "an unknown one": f"Bearer atn_{'x' * 43}",
        "a valid one but for its end": f"Bearer {swapped}",
        "in capitals": f"Bearer {own.upper()}",
        "with a letter more": f"Bearer {own}A",
        "its hash": f"Bearer {hashlib.sha256(own.encode()).hexdigest()}",
        "its first half": f"Bearer {own[: len(own) // 2]}",
        "as Basic": f"Basic {own}",
        "as Digest": f'Digest username="eve", response="{own}"',
        "expired": f"Bearer {tokens['old']}",
        "revoked": f"Bearer {tokens['gone']}",
        "of another service": f"Bearer {the.services['private'].tokens['eve']}",
    }
    others = {
        "in X-Api-Key": {"X-Api-Key": own, "X-Auth-Token": own},
        "as a proxy's": {"Proxy-Authorization": f"Bearer {own}", "X-Remote-User": "eve", "X-Forwarded-User": "eve"},
        "in a cookie of another name": {"Cookie": f"token={own}; session={own}"},
        "a false cookie": {"Cookie": f"autotune_token={swapped}"},
    }
    if how in bearers:
        return {"Authorization": bearers[how]}, ""
    return others.get(how, {}), f"?token={own}&access_token={own}" if how == "in the query" else ""


def _without_token(the: Scene, method: str, path: str, how: str) -> str | None:
    headers, query = _sent(the, how)
    answer = the.ask(method, path.format(id=the.victims["main"]["SUCCEEDED"]) + query, headers=headers, json={})
    return expect(answer, 401) or (None if answer.headers.get("www-authenticate") else "no WWW-Authenticate")


def _odd_method(the: Scene, path: str, method: str) -> str | None:
    answer = the.ask(method, path.format(id=the.victims["main"]["SUCCEEDED"]))
    return None if answer.status_code in (401, 404, 405) else f"{answer.status_code}: {answer.text[:100]}"


def false_tokens() -> Iterator[Attack]:
    """Every route with every sort of no token: 401."""
    for method, path in ROUTES:
        for how in _FALSE:
            yield Attack(f"{method} {path}, token {how}", bound(_without_token, method=method, path=path, how=how))
    for path in dict.fromkeys(path for _, path in ROUTES):
        for method in ("OPTIONS", "HEAD", "TRACE", "PROPFIND"):
            yield Attack(f"{method} {path}", bound(_odd_method, path=path, method=method))


ORDER = ("read", "submit", "admin")
_OF_ROLE = {"read": "rita", "submit": "mallory"}
_OVERRIDES = ("X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override", "X-Original-Method")


def _lesser(the: Scene, method: str, path: str, role: str) -> str | None:
    path = path.format(id=the.victims["main"]["QUEUED"])
    body = {"name": "mallory 2", "role": "admin"} if path.endswith("tokens") else {}
    return expect(the.ask(method, path, _OF_ROLE[role], json=body), 403)


def _override(the: Scene, header: str, method: str) -> str | None:
    """A read that says that it is a change is a read."""
    path = f"/v1/searches/{the.victims['main']['FAILED']}"
    return expect(the.ask("GET", f"{path}?_method={method}", "rita", headers={header: method}), 200)


def roles() -> Iterator[Attack]:
    """A lesser role than a route asks for: 403."""
    for (method, path), needed in ROUTES.items():
        for role in ORDER[: ORDER.index(needed)]:
            yield Attack(f"{method} {path} as {role}", bound(_lesser, method=method, path=path, role=role))
    for header in _OVERRIDES:
        for method in ("DELETE", "PATCH"):
            yield Attack(f"GET with {header}: {method}", bound(_override, header=header, method=method))


_STATES = ("RUNNING", "QUEUED", "SUCCEEDED", "FAILED", "ERROR", "NOTHING_FITS")


def _change_anothers(the: Scene, at: str, state: str, who: str, change: tuple[str, str, Any]) -> str | None:
    method, what, body = change
    answer = the.ask(method, f"/v1/searches/{the.victims[at][state]}{what}", who, at, json=body)
    return expect(answer, 404 if at == "private" else 403)


def _read_hidden(the: Scene, state: str, what: str) -> str | None:
    """As one that is not there."""
    found = the.victims["private"][state]
    answers = [
        the.ask("GET", f"/v1/searches/{each}{what}", "mallory", "private").text.replace(each, "ID")
        for each in (found, "0" * 16)
    ]
    if what == "/trials/0/log":  # says the same of each, but for a trial that is there
        return None if '"status":404' in answers[0] else answers[0][:200]
    return None if answers[0] == answers[1] and '"status":404' in answers[0] else f"{answers}"[:300]


def _streamed(the: Scene, state: str) -> str | None:
    path = f"/v1/searches/{the.victims['private'][state]}/events"
    return expect(the.ask("GET", path, "mallory", "private", headers={"Accept": "text/event-stream"}), 404)


def _by_tag(the: Scene, state: str) -> str | None:
    """The ETag of another's search, which may be guessed, tells nothing."""
    search_id = the.victims["private"][state]
    tag = the.ask("GET", f"/v1/searches/{search_id}", "eve", "private").headers["etag"]
    headers = {"If-None-Match": tag}
    return expect(the.ask("GET", f"/v1/searches/{search_id}", "mallory", "private", headers=headers), 404)


def _listed(the: Scene, query: str) -> str | None:
    """No list has another's."""
    rows = the.ask("GET", f"/v1/searches{query}", "mallory", "private").json()
    return f"{rows}"[:200] if [row for row in rows if row["owner"] != "mallory"] else None


def _anothers_key(the: Scene, at: str) -> str | None:
    """The Idempotency-Key of another gives no search of theirs."""
    kept_archive(the, at)
    body = {"task": "model.py", "archive": kept_archive(the, at, "ann"), "name": "keyed"}
    headers = {"Idempotency-Key": f"shared {at}"}
    first = the.ask("POST", "/v1/searches", "ann", at, json=body, headers=headers)
    second = the.ask("POST", "/v1/searches", "mallory", at, json=body, headers=headers)
    for answer, who in ((first, "ann"), (second, "mallory")):
        the.ask("POST", f"/v1/searches/{answer.json()['id']}/cancel", who, at, json={"mode": "now"})
        the.ask("DELETE", f"/v1/searches/{answer.json()['id']}", who, at)
    return None if first.json()["id"] != second.json()["id"] else "the same search"


def kept_archive(the: Scene, at: str = "main", who: str = "mallory") -> str:
    """That of the task that sleeps, which mallory has sent, too."""
    with the.services[at].client(who) as client:
        return client.put_folder(the.folder / "sleeps")


def _anothers_archive(the: Scene, at: str, more: dict[str, Any]) -> str | None:
    """By its hash, which lists show, nobody runs or reads another's code."""
    with the.services[at].client("ann") as client:
        sha256 = client.put_folder(job(the.folder / "anns", "SECRET = 1\n"))
    body = {"archive": sha256, "name": "theirs", **more}
    for sent in (b"", b"x"):
        said = expect(the.ask("PUT", f"/v1/archives/{sha256}", "mallory", at, content=sent), 422)
        if said := said or expect(the.ask("POST", "/v1/searches", "mallory", at, json=body), 422):
            return said
    return None


def _download(the: Scene, at: str, state: str) -> str | None:
    path = f"/v1/searches/{the.victims[at][state]}/archive"
    return expect(the.ask("GET", path, "mallory", at), 404 if at == "private" else 403)


def _queue(the: Scene, who: str) -> str | None:
    """With ``--private`` it has nothing of others."""
    found = the.ask("GET", "/v1/queue", who, "private").json()
    return f"{found}" if {*found} & {*the.victims["private"].values()} else None


def _name_of(the: Scene, name: str) -> str | None:
    """A second token of a name that is taken: it would own that name's searches."""
    body = {"name": name, "role": "submit"}
    answer = the.ask("POST", "/v1/tokens", "eve", json=body)
    if answer.status_code == 201:  # another name, then: it owns nothing of ann's
        path = f"/v1/searches/{the.victims['main']['QUEUED']}"
        headers = {"Authorization": f"Bearer {answer.json()['token']}"}
        changed = the.ask("PATCH", path, headers=headers, json={"priority": 0})
        the.ask("DELETE", f"/v1/tokens/{answer.json()['id']}", "eve")
        return expect(changed, 403)
    return expect(answer, 409, 422)


def _owner_in_body(the: Scene, more: dict[str, Any]) -> str | None:
    body = {"task": "model.py", "archive": kept_archive(the), **more}
    return expect(the.ask("POST", "/v1/searches", "mallory", json=body), 422)


_QUERIES = ("", "?limit=500", "?state=RUNNING", "?state=SUCCEEDED", "?before=1000000", "?owner=ann", "?private=0")
_QUERIES = (*_QUERIES, "?owner=", "?name=runs", "?name=%25", "?owner=ann&name=_", "?state=QUEUED&state=RUNNING")
_USES = ({"task": "model.py"}, {"command": ["cat", "model.py"]}, {"task": "model.py", "space": "model.py"})


def owners() -> Iterator[Attack]:
    """What is another's is not changed, and with ``--private`` not seen: victims are as they were."""
    for at in ("main", "private"):
        for state in _STATES:
            for change in CHANGES:
                words = f"{at}: {change[0]} {change[1]} {json.dumps(change[2])} of another's, {state}"
                yield Attack(words, bound(_change_anothers, at=at, state=state, who="mallory", change=change))
        yield from attempts(_anothers_key, (at,), "{}: another's Idempotency-Key")
        for more in _USES:
            yield Attack(f"{at}: another's archive, {more}", bound(_anothers_archive, at=at, more=more))
        for state in _STATES:
            yield Attack(f"{at}: the archive of one that is {state}", bound(_download, at=at, state=state))
    for state in _STATES:
        for what in READS:
            yield Attack(f"private: GET {what}, {state}", bound(_read_hidden, state=state, what=what))
        yield from attempts(_streamed, (state,), "private: the stream of one that is {}")
        yield from attempts(_by_tag, (state,), "private: the ETag of one that is {}")
    yield from attempts(_listed, _QUERIES, "private: the list {}")
    yield from attempts(_queue, ("mallory", "rita"), "private: the queue, as {}")
    yield from attempts(_name_of, ("ann", "Ann", "ann ", " ann", "ann.", "\u0430nn", "(local)"), "a token named {!r}")
    yield from attempts(
        _owner_in_body, ({"owner": "ann"}, {"id": "0" * 16}, {"state": "SUCCEEDED"}, {"home": "x"}), "submit {}"
    )
