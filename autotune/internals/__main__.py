"""``python -m autotune.internals``: which private parts the installed libraries lack, and what happens without them."""

from __future__ import annotations

import sys

from .probes import broken

if __name__ == "__main__":
    found = list(broken(imports=True))
    for feature, reason in found:
        print(f"{feature.name}: {reason}. {feature.without}.")
    print(f"{len(found)} of these are missing." if found else "Every private part is there.")
    sys.exit(1 if found else 0)
