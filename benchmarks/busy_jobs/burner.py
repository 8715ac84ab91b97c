"""Keeps a processor busy for a share of the time, in bursts of about a second; ends by itself.

`python benchmarks/busy_jobs/burner.py SHARE SECONDS SEED`
"""

import os
import random
import sys
import time


def main(share: float, most_s: float, seed: int) -> None:
    """Burn until ``most_s`` are over, or whoever started this is gone."""
    drawn, parent, until_s = random.Random(seed), os.getppid(), time.monotonic() + most_s
    while time.monotonic() < until_s and os.getppid() == parent:
        period_s = drawn.uniform(0.5, 1.5)
        busy_until_s = time.monotonic() + share * period_s
        while time.monotonic() < busy_until_s:
            pass
        time.sleep((1 - share) * period_s)


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
