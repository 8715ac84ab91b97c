"""Who is let in, and what is let in: tokens, roles, other sites' pages, archives, keys."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import replace

import pytest
from service_runs import ENDS, OPTIONS, archive, bearer, put, serving, spec, submit, until

from autotune.errors import UserError
from autotune.service.service import open_service
from autotune.service.web.limits import RequestLimit


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A service, a client without a token, and a token of each role."""
    with serving(tmp_path_factory.mktemp("guarded")) as (client, service):
        secrets = {role: service.tokens.create(role, role, 3600.0)[1] for role in ORDER}
        del client.headers["Authorization"]
        yield client, service, secrets


def test_two_servers_on_one_folder_the_second_refuses(tmp_path):
    with serving(tmp_path / "s"), pytest.raises(UserError, match="another server uses this"):
        open_service(tmp_path / "s", None, OPTIONS)


def test_two_servers_on_one_database_the_second_refuses(tmp_path):
    """Whatever state folder it has."""
    with serving(tmp_path / "s"):
        url = f"sqlite:///{tmp_path}/s/service.db"
        with pytest.raises(UserError, match=r"service\.db\.lock: another server uses this"):
            open_service(tmp_path / "other", url, OPTIONS)


ROUTES = {
    ("GET", "/v1/searches"): "read",
    ("GET", "/v1/queue"): "read",
    ("GET", "/v1/turns"): "read",
    ("GET", "/v1/searches/0123456789abcdef/archive"): "submit",
    ("GET", "/v1/searches/0123456789abcdef"): "read",
    ("GET", "/v1/searches/0123456789abcdef/events"): "read",
    ("GET", "/v1/searches/0123456789abcdef/trials"): "read",
    ("GET", "/v1/searches/0123456789abcdef/trials/1/log"): "read",
    ("GET", "/v1/searches/0123456789abcdef/log"): "read",
    ("GET", "/v1/searches/0123456789abcdef/plan"): "read",
    ("GET", "/v1/searches/0123456789abcdef/report"): "read",
    ("GET", "/v1/searches/0123456789abcdef/files"): "read",
    ("GET", "/metrics"): "read",
    ("PUT", "/v1/archives/" + "0" * 64): "submit",
    ("POST", "/v1/searches"): "submit",
    ("POST", "/v1/predict"): "submit",
    ("POST", "/v1/searches/0123456789abcdef/cancel"): "submit",
    ("POST", "/v1/searches/0123456789abcdef/resume"): "submit",
    ("PATCH", "/v1/searches/0123456789abcdef"): "submit",
    ("DELETE", "/v1/searches/0123456789abcdef"): "submit",
    ("GET", "/v1/tokens"): "admin",
    ("POST", "/v1/tokens"): "admin",
    ("DELETE", "/v1/tokens/01234567"): "admin",
}
ORDER = ("read", "submit", "admin")


def test_every_route_asks_for_its_role(guarded):
    """No token 401, a lesser role 403, the role itself neither."""
    client, _, secrets = guarded
    known = {(method.upper(), path) for path, methods in client.app.openapi()["paths"].items() for method in methods}
    assert len(known) == len(ROUTES) + 2  # /healthz and /readyz are open
    for (method, path), role in ROUTES.items():
        assert client.request(method, path).status_code == 401, path
        for own in ORDER:
            status = client.request(method, path, headers=bearer(secrets[own]), json={}).status_code
            assert (status == 403) == (ORDER.index(own) < ORDER.index(role)), (method, path, own, status)
            assert status < 500
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz").status_code == 200


CHANGES = (
    ("POST", "/cancel", {"mode": "now"}),
    ("PATCH", "", {"priority": 90}),
    ("POST", "/resume", None),
    ("DELETE", "", None),
)
READS = ("", "/events", "/trials", "/trials/0/log", "/log", "/plan", "/report", "/files")


def of_three(service):
    """Headers of two who submit, and of an admin."""
    roles = {"ann": "submit", "bob": "submit", "eve": "admin"}
    return [bearer(service.tokens.create(name, role, 3600.0)[1]) for name, role in roles.items()]


@pytest.mark.medium
def test_a_search_is_changed_by_its_owner_and_by_admins_alone(tmp_path):
    """Whatever state it is in: another is told whose it is, and nothing happens."""
    with serving(tmp_path / "s") as (client, service):
        ann, bob, eve = of_three(service)
        for owner, other in ((ann, bob), (bob, ann)):
            client.headers.update(owner)
            ids = [submit(client, trials=1000, seconds=0.05), submit(client, trials=1)]
            until(client, ids[1], "SUCCEEDED")
            for path in (f"/v1/searches/{search_id}" for search_id in ids):
                before = client.get(path).content
                for method, what, body in CHANGES:
                    answer = client.request(method, path + what, json=body, headers=other)
                    assert (answer.status_code, "'s: " in answer.json()["detail"]) == (403, True)
                assert client.get(path).json()["state"] == json.loads(before)["state"]
                assert client.get(path, headers=other).status_code == 200
            for who, search_id in ((owner, ids[1]), (eve, ids[0])):
                path = f"/v1/searches/{search_id}"
                assert client.post(f"{path}/cancel", json={"mode": "now"}, headers=who).status_code == 202
                until(client, search_id, *ENDS)
                assert client.delete(path, headers=who).status_code == 204


def test_in_private_nobody_sees_anothers_search(tmp_path):
    """Nor that there is one; an admin sees all."""
    with serving(tmp_path / "s", private=True) as (client, service):
        ann, bob, eve = of_three(service)
        client.headers.update(ann)
        search_id = submit(client, trials=1)
        until(client, search_id, "SUCCEEDED")
        for who, number in ((ann, 1), (bob, 0), (eve, 1)):
            assert len(client.get("/v1/searches", headers=who).json()) == number
            assert client.get("/v1/queue", headers=who).json() == {}
            for what in READS:
                answer, none = (client.get(f"/v1/searches/{each}{what}", headers=who) for each in (search_id, "0" * 16))
                assert (answer.status_code == 404) == (who is bob or what == "/trials/0/log"), (what, answer.text)
                assert none.status_code == 404
                if who is bob:
                    assert answer.json()["detail"] == none.json()["detail"].replace("0" * 16, search_id)
        for method, what, body in CHANGES:
            answer = client.request(method, f"/v1/searches/{search_id}{what}", json=body, headers=bob)
            assert answer.status_code == 404
        assert client.get(f"/v1/searches/{search_id}").json()["state"] == "SUCCEEDED"


def test_a_removed_owners_search_ends_and_is_the_admins(guarded):
    """The token is refused in words; its searches run on, their plans can be fetched, and an admin may change them, as
    may who gets the name."""
    client, service, secrets = guarded
    row, flo = service.tokens.create("flo", "submit", 3600.0)
    job = spec_of(client, {"submit": flo}, trials=2, holds_at="trial")
    search_id = client.post("/v1/searches", json=job, headers=bearer(flo)).json()["id"]
    path, folder = f"/v1/searches/{search_id}", service.places.search(search_id).path
    assert client.delete(f"/v1/tokens/{row.id}", headers=bearer(secrets["admin"])).status_code == 204
    refused = client.post(path + "/cancel", json={}, headers=bearer(flo))
    assert (refused.status_code, "has expired, or was revoked" in refused.json()["detail"]) == (401, True)
    early = client.get(path + "/plan", headers=bearer(secrets["read"])).json()
    assert (early["status"], "there is no plan yet" in early["detail"]) == (409, True)
    folder.mkdir(exist_ok=True)
    (folder / "go").touch()
    while (search := client.get(path, headers=bearer(secrets["read"])).json())["state"] not in ENDS:
        pass
    assert (search["state"], search["owner"]) == ("SUCCEEDED", "flo")
    assert client.get(path + "/plan", headers=bearer(secrets["read"])).status_code == 200
    others = [bearer(secrets["submit"]), bearer(service.tokens.create("flo", "submit", 3600.0)[1])]
    assert [client.delete(path, headers=who).status_code for who in others] == [403, 204]


@pytest.mark.medium
def test_an_archive_is_used_by_who_has_sent_it(tmp_path):
    """Its hash, which lists show, is no key to another's code; a search of one's own is, also after a restart."""
    data = archive(model__py='{"trials": 1}')
    sha256 = hashlib.sha256(data).hexdigest()
    path, body = f"/v1/archives/{sha256}", {"task": "model.py", "archive": sha256}
    with serving(tmp_path / "s") as (client, service):
        ann, bob, eve = of_three(service)
        cyn = bearer(service.tokens.create("cyn", "submit", 3600.0)[1])
        assert client.put(path, content=data, headers=ann).status_code == 201
        assert client.post("/v1/searches", json=body, headers=ann).status_code == 201
        for sent in (b"", b"x"):
            assert client.put(path, content=sent, headers=bob).status_code == 422
            answer = client.post("/v1/searches", json=body, headers=bob)
            assert (answer.status_code, "is not here" in answer.json()["detail"]) == (422, True)
        assert client.put(path, content=data, headers=bob).status_code == 200
        assert not list(service.places.archives.glob(".*"))
        for who in (bob, eve):
            assert client.post("/v1/searches", json=body, headers=who).status_code == 201
    with serving(tmp_path / "s") as (client, _):
        for who, status in ((ann, 201), (bob, 201), (cyn, 422)):
            assert client.post("/v1/searches", json=body, headers=who).status_code == status


def test_a_name_is_one_tokens_until_that_is_over(guarded):
    """Who has it owns its searches."""
    client, service, secrets = guarded
    body = {"name": "ann @ home", "role": "submit"}
    made = client.post("/v1/tokens", headers=bearer(secrets["admin"]), json=body).json()
    again = client.post("/v1/tokens", headers=bearer(secrets["admin"]), json={**body, "role": "read"})
    assert (again.status_code, made["id"] in again.json()["detail"]) == (409, True)
    service.tokens.revoke(made["id"])
    assert client.post("/v1/tokens", headers=bearer(secrets["admin"]), json=body).status_code == 201
    service.tokens.create("bob", "submit", -1.0)
    service.tokens.create("bob", "submit", 3600.0)


def test_a_search_that_is_as_it_was_is_not_sent_again(guarded):
    """Its ETag changes with it, and with nothing else."""
    client, _, secrets = guarded
    search_id = client.post(
        "/v1/searches", headers=bearer(secrets["submit"]), json=spec_of(client, secrets, seconds=60)
    ).json()["id"]
    path, tags = f"/v1/searches/{search_id}", []
    for body in ({"priority": 10}, {"priority": 20}):
        client.patch(path, headers=bearer(secrets["submit"]), json=body)
        until_running(client, path, secrets)
        tags.append(client.get(path, headers=bearer(secrets["read"])).headers["etag"])
        known = {**bearer(secrets["read"]), "If-None-Match": tags[-1]}
        assert (client.get(path, headers=known).status_code, client.get(path, headers=known).content) == (304, b"")
    assert tags[0] != tags[1]
    client.post(path + "/cancel", headers=bearer(secrets["submit"]), json={"mode": "now"})


def spec_of(client, secrets, **script):
    data = archive(model__py=json.dumps(script))
    sha256 = hashlib.sha256(data).hexdigest()
    client.put(f"/v1/archives/{sha256}", content=data, headers=bearer(secrets["submit"]))
    return {"task": "model.py", "archive": sha256}


def until_running(client, path, secrets):
    while client.get(path, headers=bearer(secrets["read"])).json()["summary"].get("phase") != "trials":
        pass


def test_nobody_is_let_in_without_a_token(tmp_path):
    """Whether there is one or not, whatever a proxy says, and whatever name this machine is called by."""
    with serving(tmp_path / "s") as (client, service):
        own = client.headers.pop("Authorization")
        for name, value in (("Host", "127.0.0.1"), ("X-Forwarded-For", "127.0.0.1"), ("Host", "evil.example")):
            assert client.get("/v1/searches", headers={name: value}).status_code == 401
            assert client.post("/v1/tokens", headers={name: value}, json={}).status_code == 401
        assert client.get("/v1/searches", headers={"Authorization": own}).status_code == 200
        assert service.tokens.all() == []
    with serving(tmp_path / "s") as (client, _):
        assert client.get("/v1/searches", headers={"Authorization": own}).status_code == 401


def test_a_token_is_limited_whatever_else_is_sent(tmp_path):
    """One request a second, two at once: another cookie is no other caller."""
    with serving(tmp_path / "s") as (client, service):
        client.app.state.access = replace(client.app.state.access, limit=RequestLimit(1.0))
        _, secret = service.tokens.create("ann", "read", 3600.0)
        headers = [{**bearer(secret), "Cookie": f"x={number}"} for number in range(8)]
        statuses = [client.get("/v1/searches", headers=each).status_code for each in headers]
    assert statuses[:2] == [200, 200]
    assert statuses.count(429) >= 4


def test_a_path_is_one_line_of_the_log_and_tells_no_token(client, caplog):
    with caplog.at_level("INFO"):
        client.get("/v1/%0a2026-01-01%20INFO%20forged%1b[2J")
        client.delete("/v1/tokens/atn_very-secret")
    every = [each.getMessage() for each in caplog.records if each.name == "autotune.service"]
    said = [message for message in every if "/v1/" in message]  # a driver of an earlier test may end meanwhile
    assert "GET /v1/%0A2026-01-01%20INFO%20forged%1B%5B2J 404" in said[0]
    assert "DELETE /v1/tokens/atn_... 422" in said[1]


def test_a_method_that_is_none_adds_no_series_to_the_metrics(client):
    for number in range(3):
        client.request(f"ODD{number}", "/v1/searches")
    assert 'method="other"' in client.get("/metrics").text
    assert "ODD" not in client.get("/metrics").text


def test_a_body_that_is_nested_without_end_is_refused(client):
    for path in ("/v1/searches", "/session"):
        answer = client.post(path, content=b"[" * 500_000, headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 422), answer.text


def test_a_revoked_or_expired_token_is_none(guarded):
    client, service, secrets = guarded
    made = client.post("/v1/tokens", headers=bearer(secrets["admin"]), json={"name": "ann", "role": "read"}).json()
    assert client.get("/v1/searches", headers=bearer(made["token"])).status_code == 200
    assert client.delete(f"/v1/tokens/{made['id']}", headers=bearer(secrets["admin"])).status_code == 204
    assert client.get("/v1/searches", headers=bearer(made["token"])).status_code == 401
    assert made["token"] not in client.get("/v1/tokens", headers=bearer(secrets["admin"])).text
    _, expired = service.tokens.create("old", "admin", -1.0)
    assert client.get("/v1/searches", headers=bearer(expired)).status_code == 401


def test_a_token_is_kept_as_its_hash_alone(guarded):
    _, service, secrets = guarded
    stored = service.database.path.read_bytes() + service.database.path.with_name("service.db-wal").read_bytes()
    assert hashlib.sha256(secrets["admin"].encode()).hexdigest().encode() in stored
    assert secrets["admin"].encode() not in stored


def test_the_pages_cookie_is_of_no_use_to_other_sites(guarded):
    client, _, secrets = guarded
    assert client.post("/session", json={"token": "atn_wrong"}).status_code == 403
    answer = client.post("/session", json={"token": secrets["admin"]})
    assert all(word in answer.headers["set-cookie"] for word in ("HttpOnly", "SameSite=strict", "autotune_token"))
    try:
        assert client.get("/v1/searches").status_code == 200
        for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "null"}):
            assert client.post("/v1/tokens", headers=headers, json={"name": "x", "role": "read"}).status_code == 403
        own = {"Origin": "http://localhost", "Sec-Fetch-Site": "same-origin"}
        assert client.post("/v1/tokens", headers=own, json={"name": "x", "role": "read"}).status_code == 201
    finally:
        client.cookies.clear()


def test_one_key_queues_one_search(client):
    """The same body gives the same search, another is refused, and no key queues another."""
    body = spec(client, trials=1)
    keyed = {"Idempotency-Key": "k-1"}
    first = client.post("/v1/searches", json=body, headers=keyed)
    again = client.post("/v1/searches", json=body, headers=keyed)
    assert (first.status_code, again.status_code, again.json()["id"]) == (201, 200, first.json()["id"])
    assert client.post("/v1/searches", json={**body, "seed": 1}, headers=keyed).status_code == 422
    assert client.post("/v1/searches", json=body).json()["id"] != first.json()["id"]


@pytest.mark.parametrize(
    "change",
    [
        {"task": "../model.py"},
        {"task": "/etc/passwd"},
        {"task": "--help"},
        {"task": None},
        {"command": ["python"]},
        {"archive": "0" * 64},
        {"archive": None},
        {"folder": "/etc"},
        {"archive": None, "folder": "/etc"},
        {"budget": "much"},
        {"space": "../space.yaml"},
        {"trials": 0},
        {"storage": "sqlite:///x"},
        {"priority": 101},
        {"name": "a\nb"},
        {"device": "tpu"},
        {"device": "cuda:\n"},
        {"task": None, "command": ["python", "a\0b"]},
    ],
    ids=str,
)
def test_a_search_that_cannot_be_is_refused(client, change):
    answer = client.post("/v1/searches", json={**spec(client), **change})
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")


def test_a_part_of_a_name_has_no_null(client):
    """With one, SQLite would find every name."""
    submit(client, trials=1)
    for what in ("name", "owner"):
        assert client.get(f"/v1/searches?{what}=%00").status_code == 422
        assert client.get(f"/v1/searches?{what}=%0A").json() == []


def test_an_archive_under_another_hash_is_refused(client):
    answer = client.put(f"/v1/archives/{'0' * 64}", content=archive(x="1"))
    assert (answer.status_code, "SHA-256" in answer.json()["detail"]) == (422, True)


def test_a_body_that_is_too_large_is_413(client):
    assert client.post("/v1/searches", content=b"x" * (2**20 + 1)).status_code == 413


def test_what_is_refused_leaves_no_secret_in_the_log(client, caplog):
    with caplog.at_level("DEBUG"):
        client.get("/v1/searches", headers=bearer("atn_very-secret"))
        client.post("/session", json={"token": "atn_very-secret"})
    assert caplog.text
    assert "very-secret" not in caplog.text


def test_events_are_replayed_from_the_last_that_was_seen(client):
    """The stream is the table from there on, in order, and ends with the search."""
    search_id = submit(client, trials=3)
    until(client, search_id, "SUCCEEDED")
    table = client.get(f"/v1/searches/{search_id}/events").json()
    for last in (0, 5):
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(last)}
        text = client.get(f"/v1/searches/{search_id}/events", headers=headers).text
        rows = [
            dict(line.split(": ", 1) for line in block.splitlines()) for block in text.split("\n\n") if "id: " in block
        ]
        assert [(int(row["id"]), row["event"]) for row in rows] == [
            (e["seq"], e["kind"]) for e in table if e["seq"] > last
        ]
        assert json.loads(rows[-1]["data"])["state"] == "SUCCEEDED"
        assert text.endswith("event: end\ndata: {}\n\n")


def test_an_archive_may_be_larger_than_other_bodies(client):
    """2 MiB of what does not compress."""
    import random

    assert put(client, archive(x=random.Random(0).randbytes(2**20).hex())).status_code == 201


def test_the_page_runs_its_own_scripts_alone(client):
    """No script or style stands in the page itself, and nothing comes from elsewhere."""
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert "<style" not in page.text
    assert "onclick=" not in page.text
    for name in ("page.js", "chart.js", "page.css"):
        file = client.get(f"/static/{name}")
        assert file.status_code == 200
        assert not any(word in file.text for word in ("innerHTML", "eval(", "https://"))
    assert client.get("/static/..%2Fpage.py").status_code == 404


@pytest.mark.medium
def test_a_stream_ends_with_its_token(guarded, monkeypatch):
    """Revoked while the stream is open: it says so, and ends."""
    monkeypatch.setattr("autotune.service.web.following._CHECK_S", 0.0)
    client, service, secrets = guarded
    body = spec_of(client, secrets, seconds=60)
    path = "/v1/searches/" + client.post("/v1/searches", headers=bearer(secrets["submit"]), json=body).json()["id"]
    row, secret = service.tokens.create("ann", "read", 3600.0)
    threading.Timer(1.0, service.tokens.revoke, [row.id]).start()
    text = client.get(f"{path}/events", headers={**bearer(secret), "Accept": "text/event-stream"}).text
    assert "event: state" in text
    assert text.partition("event: refused\n")[2].startswith('data: {"status": 401')
    client.post(f"{path}/cancel", headers=bearer(secrets["submit"]), json={"mode": "now"})


def test_a_folder_that_no_system_has_is_refused(tmp_path):
    """Below a shared one: not there, and with a name that is too long to be."""
    with serving(tmp_path / "s", shared=(tmp_path,)) as (client, _):
        for name in ("none", "x" * 300):
            answer = client.post("/v1/searches", json={"task": "model.py", "folder": f"{tmp_path}/{name}"})
            assert (answer.status_code, "is no folder here" in answer.json()["detail"]) == (422, True)
