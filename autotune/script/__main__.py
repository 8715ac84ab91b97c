"""``python -m autotune.script train.py --its --arguments``: what ``autotune run`` makes of ``python train.py``."""

import sys

from .launch import launch

if __name__ == "__main__":
    launch(sys.argv[1:])
