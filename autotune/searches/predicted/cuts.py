"""Cuts of the model that are worth trials: one process finds and judges them, before any trial."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from ...measure.cuts.types import Cuts, JudgedCut, JudgeOptions
from ...measure.measurement import Quality
from ...search_spaces import SearchSpace
from ...techniques import Settings, Technique
from ...techniques.models.low_rank import LowRank
from ...techniques.models.pruning import Pruning
from ...words import count, settings_words
from ...workers import Crashed, CutsJudged, JudgeRequest, Outcome, TimedOut
from ...workers.trial.traces import first_line
from ..events import CutsEnded, CutsStarted
from ..options import Drop
from ..requests import failure
from ..runs import run_once
from ..session import Session
from ..verdict import why_not
from ..winner.proof import chance, look
from .predictions import predicted

Choices = Mapping[str, tuple[Technique, ...]]

_JUDGED = (Pruning, LowRank)
"""Whose choices the process finds, where a space says ``auto``."""
_RATIOS = (0.25, 0.5, 0.75, 0.9)
"""Of all widths: a wide model may lose nine tenths."""
_TARGETS = (0.75, 0.6, 0.45, 0.36, 0.29, 0.23, 0.18, 0.14, 0.1)
"""Shares of a step's time, or of its peak, for which cuts are found whose ratios differ by group."""
_NUM_SEEDS = 3
_MOST = 3
"""Cuts that are worth trials."""
_LIKELY = 0.2
"""Chance of being proven from which on a cut is worth trials, where others have it."""
_PART = 0.25
"""Largest share of ``--max-time`` that judging takes, once its process has read the task."""
_MOST_S = 3600.0
"""Most seconds without ``--max-time``."""


@dataclass(frozen=True)
class Found:
    """What a search may try of cuts."""

    choices: Choices
    """Of every technique."""
    functions: frozenset[Settings] | None = None
    """What a configuration may compute, as settings that affect that alone; None is any."""


def find_cuts(session: Session, space: SearchSpace) -> Found:
    """Have cuts found and judged where the space leaves them to the search, and take those that are worth trials in the
    place of a grid; where that cannot be done, the grid stays."""
    choices = space.choices(session.facts)
    names = [
        kind.name for kind in _JUDGED if getattr(space, kind.name) == "auto" and len(choices.get(kind.name, ())) > 1
    ]
    drop, reference = session.options.max_quality_drop, session.reference_settings
    if not names or drop is None:
        return Found(choices)
    grid = {**choices, Pruning.name: (Pruning(), *(Pruning(kind="structured", ratio=ratio) for ratio in _RATIOS))}
    own = (reference.having(*cut) for cut in itertools.product(*(grid[name] for name in names)))
    candidates = tuple(one for one in own if one.affect("function") and one.conflict() is None)
    outcome = _ask(session, candidates, drop)
    if not isinstance(outcome, CutsJudged):
        if outcome is not None:
            session.warn(f"cuts are tried one by one: {first_line(failure(outcome))}")
        return Found(choices)
    found = outcome.found
    for note in (*found.notes, *_refused(found)):
        session.warn(note)
    chosen = worth_trials(found, drop)
    session.take_judged({cut.settings.part("function"): pairs_of(cut, found) for cut in chosen}, found.reference)
    session.no_cut = None if chosen else _why_none(found, drop)
    session.observe(CutsEnded(len(found.cuts), tuple(_row(cut, found) for cut in chosen)))
    rows = {
        name: tuple(dict.fromkeys([choices[name][0], *(getattr(c.settings, name) for c in chosen)])) for name in names
    }
    others = [row for name, row in choices.items() if name not in names and any(one.changes_function for one in row)]
    plain = (reference.having(*one).part("function") for one in itertools.product(*others))
    functions = frozenset([*plain, *(cut.settings.part("function") for cut in chosen)])
    return Found({**choices, **rows}, functions)


def pairs_of(cut: JudgedCut, found: Cuts) -> list[tuple[Quality, Quality]]:
    """Its quality and the reference's from each seed that both were judged from."""
    return [*zip(cut.qualities, found.reference.qualities, strict=False)]


def worth_trials(found: Cuts, drop: Drop) -> list[JudgedCut]:
    """The fastest, or smallest, of those that are likely to be proven, or may still be where none is, and those that
    are slower and better; fastest first."""
    able = [
        cut
        for cut in found.cuts
        if len(pairs_of(cut, found)) == _NUM_SEEDS and look(pairs_of(cut, found), drop) in ("kept", "unknown")
    ]
    likely = [cut for cut in able if chance(pairs_of(cut, found), drop) >= _LIKELY]
    front: list[JudgedCut] = []
    for cut in sorted(likely or able, key=lambda one: one.cost):
        if not front or _change(cut, found) > _change(front[-1], found):
            front.append(cut)
    return front[:_MOST]


def _why_none(found: Cuts, drop: Drop) -> str | None:
    """Why none of them is worth a trial, by the best of those that came farthest; None where none was judged at all."""
    judged = [cut for cut in found.cuts if cut.rungs or cut.qualities]
    if not judged:
        return None
    best = max(judged, key=lambda cut: (len(cut.qualities), len(cut.rungs), _last(cut)))
    pairs = pairs_of(best, found)
    why = why_not(pairs, drop) if pairs else best.ended or "the time was up before it was judged"
    what, name = count(len(found.cuts), "cut"), settings_words(best.settings.part("function"))
    return f"none of {what} of the model can be used; the best, {name}: {why}"


def _last(cut: JudgedCut) -> float:
    return fmean(one.value for one in cut.qualities) if cut.qualities else cut.rungs[-1]


def _change(cut: JudgedCut, found: Cuts) -> float:
    """Of the quality, as a share of the reference's."""
    pairs = pairs_of(cut, found)
    reference = fmean(other.value for _, other in pairs)
    return fmean(one.value - other.value for one, other in pairs) / (abs(reference) or 1.0)


def _row(cut: JudgedCut, found: Cuts) -> tuple[Settings, float, float]:
    return cut.settings, 1 / (cut.step or 1.0), _change(cut, found)


def _refused(found: Cuts) -> list[str]:
    """Why nothing could be cut, if so, once for each reason."""
    reasons = [cut.ended for cut in found.cuts if cut.ended is not None and not cut.rungs]
    return list(dict.fromkeys(reasons)) if len(reasons) == len(found.cuts) else []


def _ask(session: Session, candidates: tuple[Settings, ...], drop: Drop) -> Outcome | None:
    """The process's answer; a process that dies is begun again once, and goes on from what that one kept."""
    keep = session.cuts_file
    if not session.study.resumed:
        with suppress(OSError):
            keep.unlink()

    def make() -> JudgeRequest | None:
        return _request(session, candidates, drop, keep)

    outcome = run_once(session, "cuts", make, CutsStarted(len(candidates)))
    if isinstance(outcome, Crashed | TimedOut):
        session.warn(f"judging cuts ended early, and goes on from what it had found: {first_line(failure(outcome))}")
        outcome = run_once(session, "cuts:again", make)
    return outcome


def _is_over_budget(session: Session) -> bool:
    """Whether the job as it stands is: what a cut saves of its memory counts then, and not of its time."""
    budget = session.budget
    if budget.of_reference is not None:
        return budget.of_reference < 1
    known = predicted(session, session.reference_settings) if budget.of_device is not None else None
    return known is not None and not budget.holds(known.peak_bytes)


def _request(session: Session, candidates: tuple[Settings, ...], drop: Drop, keep: Path) -> JudgeRequest | None:
    time_budget, max_time_s = session.time_budget, session.options.max_time
    most_s = _MOST_S if max_time_s is None else _PART * max_time_s
    if not math.isinf(time_budget.left_s()) and most_s < 2 * time_budget.read_s:
        session.warn("cuts are tried one by one: --max-time leaves no time to judge them all in one process.")
        return None
    options = JudgeOptions(
        recovery=session.quality_options(is_reference=True),
        seeds=tuple(session.options.seed + number for number in range(_NUM_SEEDS)),
        candidates=candidates,
        targets=_TARGETS if any(one.pruning.runs_model for one in candidates) else (),
        allowed=max(drop.value, 1e-12),
        is_share=drop.is_share,
        by_bytes=_is_over_budget(session),
        most=_MOST,
        most_s=most_s,
        keep=str(keep),
    )
    return session.requests.judge_request("cuts", session.reference_settings, options, time_budget)
