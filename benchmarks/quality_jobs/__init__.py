"""Six jobs that go on from trained weights, each a task file as a user writes one.

Beside what a task has, each says how long it is trained first and how long a cut recovers, and gives the scores of its
examples: ``scores(model, part)``, of which ``JUDGED`` is what ``evaluate`` judges by, and ``HELD_OUT`` what no search
sees.
"""
