"""The types of device that ``--devices`` names, each with its processes and its budget."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import UnlikeDevices, UserError
from ...searches.options import read_budget
from ...units import slug
from ...workers.devices import split_device
from ..where import Where, default_device, trials

ONCE = "Name each type once, with its number of ranks behind it: cuda:A100*2."
_ITEM = re.compile(r"(?P<device>[^*=]+?)\s*(\*\s*(?P<ranks>\d+)\s*)?(=\s*(?P<budget>.+))?")
_EVERY = ("all", "cpu", "cuda")
_ONE = "For one type, give --device in place of --devices"


@dataclass(frozen=True)
class UnlikeType:
    """A type of device, and what is asked of it."""

    device: str
    """``cuda:A100``."""
    ranks: int | None = None
    """Processes of the training; None is one for each such device that there is."""
    budget: str | None = None
    """``70GiB`` or ``90%``; None is ``--budget``."""

    @property
    def name(self) -> str:
        """Of its search."""
        return slug(self.device)[:80]

    def asked(self) -> dict[str, str]:
        """Options of its search that it states itself."""
        return {} if self.budget is None else {"budget": self.budget}


def split_devices(text: str) -> tuple[UnlikeType, ...]:
    """The types of ``cuda:A100*2=70GiB,cuda:T4*4=14GiB``; none of ``all``, ``cpu`` and ``cuda``, which mean every one.

    Raises:
        UserError: it is something else, or names a type twice, one alone, or some of either kind.
    """
    if text in _EVERY:
        return ()
    types = tuple(_type_of(item) for item in re.split(r",\s*(?=cpu|cuda)", text))
    if twice := [name for name, number in Counter(one.name for one in types).items() if number > 1]:
        raise UserError(f"--devices {text}: {twice[0]} is named twice. {ONCE}")
    if len(types) == 1:
        raise UserError(f"--devices {text}: one type alone shares with none. {_ONE}.")
    if len({split_device(one.device)[0] for one in types}) > 1:
        raise UserError(
            f"--devices {text}: ranks on CPUs and ranks on GPUs exchange gradients by different backends, and cannot "
            "train together. Name types of one kind."
        )
    return types


def _type_of(item: str) -> UnlikeType:
    matched = _ITEM.fullmatch(item.strip())
    ranks = int(matched["ranks"]) if matched and matched["ranks"] else None
    try:
        if matched is None or ranks == 0:
            raise ValueError("a type of device was expected, and maybe *RANKS and =BUDGET behind it")
        split_device(matched["device"])
        if matched["budget"]:
            read_budget(matched["budget"])
    except ValueError as reason:
        raise UserError(f"--devices {item}: {reason}. Write for example cuda:A100*2=70GiB,cuda:T4*4=14GiB.") from None
    return UnlikeType(matched["device"], ranks, matched["budget"])


def every_type(text: str, task: str, where: Where) -> tuple[UnlikeType, ...]:
    """Each type that there is of a kind of device.

    Raises:
        UserError: there is none, or but one.
    """
    kind = default_device(where.address) if text == "all" else split_device(text)[0]
    try:
        with trials(where, task, kind) as executor:
            raise UserError(f"--devices {text}: there is one type alone, {executor.device_type}. {_ONE}.")
    except UnlikeDevices as error:
        return tuple(UnlikeType(f"{kind}:{_told_apart(name, error.types)}") for name in error.types)


def _told_apart(name: str, types: Sequence[str]) -> str:
    """The shortest part of a type, between its commas, that no other has; all of it if each is another's too."""
    others = " ".join(other.lower() for other in types if other != name)
    return min((part for part in name.split(", ") if part.lower() not in others), key=len, default=name)
