"""A function of torch's, replaced until it is put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def patch(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Replace a function by ``around(original, *args)``.

    Args:
        owner: a class or a module.
        name: of the function there.
        around: takes the original and its arguments.

    Returns:
        What puts the original back, unless another has replaced it since.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def answer(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, answer)

    def take_off() -> None:
        if getattr(owner, name) is answer:
            setattr(owner, name, original)

    return take_off
