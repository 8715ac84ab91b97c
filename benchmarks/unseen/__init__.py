"""Models of kinds that the estimator was not developed on, in rounds: what one showed was mended before the next."""

from __future__ import annotations

from . import first, fourth, second, third

__all__ = ["IMAGES", "ROUNDS"]

ROUNDS = {"first": first.MODELS, "second": second.MODELS, "third": third.MODELS, "fourth": fourth.MODELS}
"""What builds each model and a batch, by round and name."""
IMAGES = (*first.IMAGES, *second.IMAGES, *third.IMAGES, *fourth.IMAGES)
"""Those that are run with images in channels_last too."""
