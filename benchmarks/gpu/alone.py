"""Calls one function in this process, which nothing has used a card in before: ``python -m benchmarks.gpu.alone
MODULE:FUNCTION '{"argument": 1}'`` prints what it returns as JSON, last."""

from __future__ import annotations

import importlib
import json
import sys

if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    print(json.dumps(getattr(importlib.import_module(module), name)(**json.loads(sys.argv[2]))))
