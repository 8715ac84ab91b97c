"""What nobody means to send: every operation of the API answers it, and none with a failure of ours."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `service` is not installed")
pytest.importorskip("schemathesis", reason="schemathesis is not installed")

import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from service_runs import serving

QUICK = settings(
    max_examples=8, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def send(client: Any, case: Any) -> int:
    """The status of an answer."""
    sent = case.as_transport_kwargs(base_url="http://localhost")
    headers = {name: value for name, value in dict(sent.get("headers") or {}).items() if isinstance(value, str)}
    readable = {name: value for name, value in headers.items() if value.isascii() and value.isprintable()}
    body = {"content" if name == "data" else name: sent[name] for name in ("json", "data", "params") if sent.get(name)}
    answer = client.request(sent["method"], sent["url"], headers={**readable, "Host": "localhost"}, **body)
    assert answer.status_code < 500, (sent["method"], sent["url"], answer.text)
    return answer.status_code


def answers(client: Any, strategy: Any, statuses: list[int]) -> None:
    """Send what the strategy makes."""

    @QUICK
    @given(strategy)
    def run(case: Any) -> None:
        statuses.append(send(client, case))

    run()


def test_nothing_that_is_sent_is_a_failure_of_ours(tmp_path):
    """Requests made from the API's own description, and some that go against it."""
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    seen: dict[str, list[int]] = {}
    with serving(tmp_path / "state") as (client, _):
        schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
        for operation in (found.ok() for found in schema.get_all_operations()):
            statuses = seen.setdefault(operation.label, [])
            for mode in modes:
                strategy = operation.as_strategy(generation_mode=mode)
                try:
                    answers(client, strategy, statuses)
                except Unsatisfiable:  # nothing goes against an operation that takes nothing
                    assert mode is schemathesis.GenerationMode.NEGATIVE
    assert len(seen) > 15
    assert all(seen.values())
    assert {status for statuses in seen.values() for status in statuses} >= {200, 404, 422}
