"""One command, one card, one file to send: what this package claims of CUDA, checked on the card that is here.

    python -m benchmarks.gpu                   # all twenty checks, some 20 minutes
    python -m benchmarks.gpu --minutes 9       # as many as begin within nine; again, and it goes on with the next
    python -m benchmarks.gpu --check 3 --check 9

It writes `gpu-report.json`: a row for each check, with its bar, what was measured, a verdict and the seconds it took.
No path and no user's name is in it. A check that cannot run here says why. The exit code is 1 where one is over its
bar, and 2 where there is no card. Of several cards, all checks but the last use the first one.
"""
