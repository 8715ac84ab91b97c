"""Calls a function in this process, which nothing has used a card in before: ``python -m benchmarks.gpu.alone
MODULE:FUNCTION`` reads a line of arguments as JSON, prints what the function returns as JSON, and reads the next."""

from __future__ import annotations

import importlib
import json
import sys

if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(module), name)
    for line in sys.stdin:
        print(json.dumps(function(**json.loads(line))), flush=True)
