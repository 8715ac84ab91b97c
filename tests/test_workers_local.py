"""The local executor holds the contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.testing.executors import IsolationContract
from autotune.workers.local import LocalExecutor


class TestLocalExecutor(IsolationContract):
    tasks = Path(__file__).parent / "tasks"
    executor_class = LocalExecutor

    @pytest.fixture
    def executor(self, local_executor):
        return local_executor
