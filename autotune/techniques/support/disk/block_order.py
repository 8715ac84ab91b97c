"""Which blocks a job comes to next."""

from __future__ import annotations

import torch

from .copies import AHEAD

Visit = tuple[int, bool]
"""A block's number, and whether backward is at it."""
_REMEMBERED = 4
"""So many tell what comes next: of two recomputed blocks, backward comes to the second after the first, and to the
first again."""


class BlockOrder:
    """A training goes forward through the blocks, and back; inference forward, from the first again after the last.
    Another order is known once it was gone through: recomputed blocks, of which several are at a time."""

    def __init__(self, in_inference: bool, learns: bool) -> None:
        """
        Args:
            in_inference: whether no backward follows a forward.
            learns: whether it goes by what it has seen.
        """
        self._in_inference, self._learns = in_inference, learns
        self._past: tuple[Visit, ...] = ()
        """The last few, and by them what came next."""
        self._known: dict[tuple[Visit, ...], Visit] = {}

    def begin(self) -> None:
        """Nothing was visited."""
        self._past = ()

    def is_at(self, block: int) -> bool:
        """Whether this is the one that computes; it is from here on."""
        visit = block, torch._C._current_graph_task_id() != -1
        if self._past[-1:] == (visit,):
            return True
        if self._learns:
            self._known[self._past] = visit
        self._past = _with(self._past, visit)
        return False

    @property
    def last(self) -> Visit | None:
        """The visit before this one."""
        return self._past[-2] if len(self._past) > 1 else None

    def coming(self, num_blocks: int) -> list[Visit]:
        """This visit, and those after it, of two further blocks."""
        past = self._past
        visits = [past[-1]]
        for _ in range(2 * AHEAD):
            visit = self._known.get(past) or self._after(past[-1], num_blocks)
            past, blocks = _with(past, visit), {one for one, _ in visits}
            if visit[0] in blocks or len(blocks) <= AHEAD:
                visits.append(visit)
        return visits

    def _after(self, visit: Visit, num_blocks: int) -> Visit:
        block, goes_back = visit
        if goes_back:
            return (block - 1, True) if block else (0, False)
        if block < num_blocks - 1:
            return block + 1, False
        return (0, False) if self._in_inference else (block, True)


def _with(past: tuple[Visit, ...], visit: Visit) -> tuple[Visit, ...]:
    return (*past, visit)[-_REMEMBERED:]
