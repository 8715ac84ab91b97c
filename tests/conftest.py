"""What tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autotune.workers import Executor


@pytest.fixture(scope="session")
def local_executor() -> Iterator[Executor]:
    """One local executor for the session: its fork servers import torch once."""
    from autotune.workers.local import LocalExecutor

    with LocalExecutor() as executor:
        yield executor


@pytest.fixture(scope="session")
def ray_executor() -> Iterator[Executor]:
    """One Ray cluster for the session: it takes seconds to start."""
    pytest.importorskip("ray", reason="Ray is not installed")
    from autotune.workers.cluster import RayExecutor

    with RayExecutor() as executor:
        yield executor
