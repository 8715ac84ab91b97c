"""What tests of cards share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stand_in import Card


@pytest.fixture
def card() -> Iterator[Card]:
    """A card that stands in for this machine's; what a test sets of it holds from then on."""
    one = Card()
    with one.in_place():
        yield one
