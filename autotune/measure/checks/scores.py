"""What ``evaluate`` says of each example, and its mean; packed small, since a study keeps dozens of them."""

from __future__ import annotations

import base64
import itertools
import math
import random
import zlib
from array import array
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

MOST_KEPT = 8192
"""Numbers that are kept of one evaluation: of more examples, the means of at most so many groups, drawn by chance but
the same each time. The error of a mean is found from them just as well."""
FARTHEST = 3e38
"""Beyond it a score's distance from the mean is no float32."""


class Judged(NamedTuple):
    """How good a model is, by ``evaluate``."""

    value: float
    """Higher is better; of scores, their mean."""
    error: float = 0.0
    """Its standard error; 0 where a number alone was returned."""
    num_examples: int | None = None
    """That have a score each; None where none has."""
    scores: str | None = None
    """Theirs, packed."""


def judged_by(scores: Sequence[float]) -> Judged:
    """The mean of at least two scores, with its standard error.

    Args:
        scores: one for each example, in the order in which every configuration is evaluated on them; each within
            :data:`FARTHEST` of the mean.
    """
    value, number = fmean(scores), len(scores)
    distances = [score - value for score in scores]
    error = math.hypot(*distances) / math.sqrt(number * (number - 1))
    return Judged(value, error, number, _packed(distances))


def unpack(packed: str) -> array[float]:
    """Each score's distance from their mean."""
    return array("f", zlib.decompress(base64.b64decode(packed)))


def _packed(distances: list[float]) -> str:
    """As text: float32, compressed, base64."""
    if len(distances) > MOST_KEPT:
        random.Random(0).shuffle(distances)
        groups = len(distances) // -(-len(distances) // MOST_KEPT)
        ends = [len(distances) * number // groups for number in range(groups + 1)]
        distances = [fmean(distances[low:high]) for low, high in itertools.pairwise(ends)]
    return base64.b64encode(zlib.compress(array("f", distances).tobytes())).decode()
