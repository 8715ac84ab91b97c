"""What nobody means to send: every operation of the API answers it, and none with a failure of ours."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi", reason="the extra `service` is not installed")
pytest.importorskip("schemathesis", reason="schemathesis is not installed")

import schemathesis
from hypothesis import HealthCheck, settings
from service_runs import OPTIONS

from autotune.service.service import open_service
from autotune.service.web.app import make_app


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    service = open_service(tmp_path_factory.mktemp("fuzz") / "state", None, OPTIONS, on_loopback=True)
    yield schemathesis.openapi.from_asgi("/openapi.json", make_app(service))
    service.close()


schema = schemathesis.pytest.from_fixture("api")


@schema.parametrize()
@settings(max_examples=6, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_nothing_that_is_sent_is_a_failure_of_ours(case):
    case.headers = {**dict(case.headers or {}), "Host": "localhost"}
    response = case.call()
    assert response.status_code < 500
