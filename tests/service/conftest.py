"""What tests of the service share."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

_IS_INSTALLED = importlib.util.find_spec("fastapi") is not None
collect_ignore_glob = [] if _IS_INSTALLED else ["test_*.py"]


def pytest_report_header() -> str | None:
    """Say what is left out."""
    return None if _IS_INSTALLED else "tests/service: left out, since the extra `service` is not installed"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Of a service that this machine alone can reach."""
    from service_runs import serving

    with serving(tmp_path_factory.mktemp("service")) as (client, _):
        yield client
