"""``python -m autotune``."""

import os
import sys

if sys.path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]  # a task called numpy.py in the current folder is not the numpy that is wanted here

from .cli.main import main

if __name__ == "__main__":
    main()
