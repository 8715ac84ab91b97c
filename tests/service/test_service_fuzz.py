"""What nobody means to send: every operation of the API answers it, and none with a failure of ours. With ``-rP`` each
test says how many requests it has sent."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest

pytest.importorskip("schemathesis", reason="schemathesis is not installed")

import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.specs.openapi import checks
from service_runs import serving, submit, until

from autotune.service.store.tables import METADATA

TRUE = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
]
"""Statuses, types and bodies are those that the description has."""
QUICK = settings(
    max_examples=8, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def send(client: Any, case: Any, secret: str | None) -> int:
    """The status of an answer; with a token's secret, to who has it."""
    sent = case.as_transport_kwargs(base_url="http://localhost")
    headers = {name: value for name, value in dict(sent.get("headers") or {}).items() if isinstance(value, str)}
    readable = {name: value for name, value in headers.items() if value.isascii() and value.isprintable()}
    body = {"content" if name == "data" else name: sent[name] for name in ("json", "data", "params") if sent.get(name)}
    own = {"Host": "localhost"} | ({"Authorization": f"Bearer {secret}"} if secret else {})
    kept = {name: value for name, value in readable.items() if name.title() not in own}
    answer = client.request(sent["method"], sent["url"], headers={**kept, **own}, **body)
    assert answer.status_code < 500, (sent["method"], sent["url"], answer.text)
    case.validate_response(answer, checks=TRUE)
    return answer.status_code


def answers(client: Any, strategy: Any, statuses: list[int], secret: str | None = None) -> None:
    """Send what the strategy makes."""

    @QUICK
    @given(strategy)
    def run(case: Any) -> None:
        statuses.append(send(client, case, secret))

    run()


@pytest.mark.slow
def test_nothing_that_is_sent_is_a_failure_of_ours(tmp_path):
    """Requests of an admin's, made from the API's own description, and some that go against it; of ids that no search
    has, and of one that has ended. What is answered has a status, a type and a body that the description names."""
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    seen: dict[str, list[int]] = {}
    with serving(tmp_path / "state") as (client, service):
        secret = service.tokens.create("ann", "admin", 3600.0)[1]
        schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
        for operation in (found.ok() for found in schema.get_all_operations()):
            statuses = seen.setdefault(operation.label, [])
            for mode in modes:
                strategy = operation.as_strategy(generation_mode=mode)
                try:
                    answers(client, strategy, statuses, secret)
                except Unsatisfiable:  # nothing goes against an operation that takes nothing
                    assert mode is schemathesis.GenerationMode.NEGATIVE
            if "{search_id}" in operation.path:
                search_id = until(client, submit(client, trials=1), "SUCCEEDED")["id"]
                answers(client, operation.as_strategy().map(partial(of, search_id)), statuses, secret)
                assert [status for status in statuses if status < 400 or status == 409] or "{number}" in operation.path
    tell(seen)
    assert len(seen) > 15
    assert all(seen.values())
    assert {status for statuses in seen.values() for status in statuses} >= {200, 404, 422}


@pytest.mark.slow
def test_nothing_that_is_sent_without_a_token_has_an_effect(tmp_path):
    """The same requests, and nobody who asks: each is refused, and database and files are as they were."""
    seen: dict[str, list[int]] = {}
    with serving(tmp_path / "state") as (client, service):
        own = client.headers["Authorization"]
        del client.headers["Authorization"]
        before = everything(service)
        schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
        for operation in (found.ok() for found in schema.get_all_operations()):
            statuses = seen.setdefault(operation.label, [])
            answers(client, operation.as_strategy(), statuses)
            if operation.path not in ("/healthz", "/readyz"):
                assert not [status for status in statuses if status < 400], operation.label
        assert everything(service) == before
        assert client.get("/v1/searches", headers={"Authorization": own}).status_code == 200
    tell(seen)
    assert {status for statuses in seen.values() for status in statuses} >= {401}


def of(search_id: str, case: Any) -> Any:
    """The same request of this search."""
    case.path_parameters["search_id"] = search_id
    return case


def tell(seen: dict[str, list[int]]) -> None:
    """How often each status was answered."""
    statuses = Counter(status for each in seen.values() for status in each)
    print(f"{statuses.total()} requests to {len(seen)} operations: {dict(sorted(statuses.items()))}")


def everything(service: Any) -> tuple[Any, ...]:
    """All rows, and the names of all files but the database's own."""
    with service.database.reading() as connection:
        rows = [connection.execute(table.select()).all() for table in METADATA.sorted_tables]
    state = service.places.state
    return rows, sorted(str(path) for path in state.rglob("*") if not path.name.startswith("service.db"))
