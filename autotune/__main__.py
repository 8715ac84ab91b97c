"""``python -m autotune``."""

import os
import sys

if sys.path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]  # a task called numpy.py in the current folder is not the numpy that is wanted here

from .distribution import check_is_whole

if __name__ == "__main__":
    check_is_whole()

    from .cli.main import main

    main()
