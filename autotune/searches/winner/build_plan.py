"""The end of a search: the plan with its notes."""

from __future__ import annotations

import math
import platform
import shlex
import statistics
from collections.abc import Iterator, Sequence

from ...distribution import VERSION
from ...files import hash_of
from ...measure.measurement import NO_EVALUATION, CardState
from ...plan import Environment, Evidence, Gain, Inference, KeptWeights, Plan, QualityEvidence, SearchRecord, TaskRef
from ...techniques import Facts, Settings
from ...techniques.data_loading import DataLoading
from ...units import ceil_mib, format_bytes
from ...words import card_words, count, pile_words
from ...workers import Measured, OutOfMemory
from ..session import Session
from ..store.tried import Tried
from ..time_budget import MOST_ROUNDS
from ..verdict import SPOILED
from .evaluation import evaluation_of
from .evidence import are_sure, calm, combine, gain
from .final import Final, run_name
from .nothing_fits import nothing_fits
from .proof import difference_of

_WIDE = 0.25
"""Relative half-width of a 95 % interval from which on a note asks whether the machine is shared."""
_BREAKS_SAID = 3
"""Most places that a note names; a trial's record has all."""
_MUCH_WAITING = 0.1
"""Share of the time spent waiting for data from which on a note says so."""


def build_plan(session: Session, final: Final, stopped: str) -> Plan:
    """The plan of the winner.

    Raises:
        NothingFits: there is none; the message has the nearest miss.
    """
    winner = final.winner
    if winner is None:
        raise nothing_fits(session)
    assert isinstance(winner.outcome, Measured)
    disturbed = [pair.winner for pair in final.rounds if pair not in final.pairs]
    repeats = final.repeats or [winner.outcome.measurement]
    budget = session.budget if winner.number else session.budget.of_job(*(run.peak.process for run in repeats))
    measured = combine(repeats, budget, disturbed, final.by_turns)
    reference, reason = _reference(session, final)
    facts, options = session.facts, session.options
    gained = gain(measured, measured if winner.number == 0 else reference, final.pairs, reason)
    # a plan says by itself what was measured
    settings = winner.applied.in_force(facts.precision)
    if winner.settings.affect("function"):
        measured = _with_tensors(session, measured, winner.settings)
        reference = _with_tensors(session, reference, session.reference_settings) if reference is not None else None
    return Plan(
        task=TaskRef(source=options.task, fingerprint=facts.fingerprint, identity=facts.identity),
        inference=_inference(session, winner) if facts.inference else None,
        budget=session.budget if session.budget.over(measured.peak) is None else budget,
        settings=settings,
        exactness={one.name: one.exactness(facts) for one in settings.chosen()},
        checked=None if winner.number == 0 else winner.outcome.measurement.parity.compared,
        notes=tuple(_notes(session, final, measured, reference)),
        measured=measured,
        reference=measured if winner.number == 0 else reference,
        evaluation=evaluation_of([*repeats, *disturbed]),
        quality=_quality(session, final),
        weights=_weights(session, final),
        gain=gained.model_copy(update={"unproven": _unproven(session, final, gained, reference)}),
        environment=environment_of(facts, [one.card for one in (*repeats, *disturbed) if one.card is not None]),
        search=SearchRecord(
            trials=session.study.num_measured,
            known=len(session.study.tried) - session.study.num_measured or None,
            seconds=round(session.seconds(), 1),
            stopped=stopped,
            study=session.study.name,
            sampler=options.sampler,
            seed=options.seed,
        ),
    )


def _inference(session: Session, winner: Tried) -> Inference:
    """How the winner's outputs were compared; those of the reference are its own."""
    assert isinstance(winner.outcome, Measured)
    parity, drop, reference = (
        winner.outcome.measurement.parity,
        session.options.max_quality_drop,
        session.reference_parity,
    )
    deviation = float(f"{parity.deviation:.3g}") if winner.number and parity.compared is not None else None
    known = None if reference is None else reference.quality
    if drop is None or (known is None and drop.is_share):  # a share of what is not known: nothing that rounds was used
        return Inference(tolerance=session.options.tolerance, deviation=deviation)
    return Inference(
        deviation=deviation, max_drop=drop.of(known or 0.0), quality=parity.quality, reference_quality=known
    )


def _with_tensors(session: Session, evidence: Evidence, settings: Settings) -> Evidence:
    """With what is predicted of the tensors, where nothing measured them: what a smaller model saves of a process may
    be little beside its imports, and is what counts on a card."""
    known = session.foreseen.predict(settings)
    if known is None or not known.tensor_bytes or evidence.peak.allocated is not None:
        return evidence
    peak = evidence.peak.model_copy(update={"tensors": ceil_mib(known.tensor_bytes)})
    return evidence.model_copy(update={"peak": peak})


def _unproven(session: Session, final: Final, found: Gain, reference: Evidence | None) -> str | None:
    """Why nothing is known to have been gained; None where it is, and where the job as it stands does not fit."""
    assert final.winner is not None, "there is a plan"
    if reference is None or not reference.fits or found.speed is None:
        return None
    if final.winner.number == 0 and session.study.fallen:
        return "what could be faster than the job as it stands fell when it was measured again"
    if final.winner.number == 0:
        return "nothing was seen to be faster than the job as it stands, which is the plan"
    least = min((pair.disturbed for pair in final.rounds), default=0.0)
    if least >= SPOILED:
        return f"other work took {least:.0%} of the time or more whenever the plan was measured"
    if found.low is None or found.high is None:
        return "the plan and the job as it stands did not take turns twice"
    return None if found.is_proven else f"its speed is {found.low:.2f}x to {found.high:.2f}x the reference's, at 95 %"


def environment_of(facts: Facts, cards: Sequence[CardState] = ()) -> Environment:
    """Where a task was measured, and with which versions, as a plan states it; ``cards`` is what was seen of its GPU
    meanwhile."""
    return Environment(
        torch=facts.torch_version,
        device=facts.device.name,
        driver=facts.device.driver,
        autotune=VERSION,
        python=platform.python_version(),
        threads=facts.num_threads if facts.device.type == "cpu" else None,
        tf32=facts.tf32,
        card=card_words(cards) or None,
    )


def _quality(session: Session, final: Final) -> QualityEvidence | None:
    """The quality of a winner that changes what the model computes; None for any other."""
    found, drop = final.qualities, session.options.max_quality_drop
    if not found or drop is None or final.winner is None or not final.winner.settings.affect("function"):
        return None
    value, reference = (statistics.fmean(one.value for one in row) for row in zip(*found, strict=True))
    difference = difference_of(found, drop.of(reference))
    return QualityEvidence(
        value=round(value, 6),
        reference=round(reference, 6),
        max_drop=round(drop.of(reference), 6),
        pairs=len(found),
        most_lost=round(difference.half() - difference.value, 6),
        over_examples=difference.examples > 0,
        samples=session.options.recovery_steps * session.facts.effective_batch,
        recovered=found[0][0].recovered,
        lr_factor=None if session.options.recovery_lr == 1 else session.options.recovery_lr,
        distilled=True if session.options.distill else None,
    )


def _weights(session: Session, final: Final) -> KeptWeights | None:
    """What the winner's first judgement recovered: that one whatever the others came to, since the best of several
    would look better than it is. None where it was not asked for, or there is none, which is said."""
    if not session.options.keep_weights or final.winner is None:
        return None
    of_round = final.rounds[0].winner.quality if final.rounds else None
    quality = final.proven[0][0] if final.proven else of_round
    if quality is None or not final.winner.settings.affect("function"):
        session.warn("--keep-weights: the plan's model computes what the job's does: there is nothing to recover.")
        return None
    path, seed = session.weights_file(run_name(final.winner, 1)), session.options.seed + (not final.proven)
    try:
        return KeptWeights(hash=hash_of(path), quality=quality.value, seed=seed, path=str(path))
    except OSError as error:
        session.warn(f"--keep-weights: {path}: {error.strerror}: the plan goes on from the task's own weights.")
        return None


def _reference(session: Session, final: Final) -> tuple[Evidence | None, str | None]:
    """The reference's evidence, or the reason why there is none."""
    tried = session.reference
    if tried is None:
        return None, "the reference was not measured"
    if isinstance(tried.outcome, OutOfMemory):
        peak = format_bytes(ceil_mib(tried.outcome.peak_bytes))
        return None, f"the reference ran out of memory at {peak}: {tried.outcome.message}"
    assert isinstance(tried.outcome, Measured)
    runs = final.reference or [tried.outcome.measurement]
    budget = session.budget.of_job(*(run.peak.process for run in runs))
    return combine(runs, budget, by_turns=final.by_turns), None


def _notes(session: Session, final: Final, measured: Evidence, reference: Evidence | None) -> Iterator[str]:
    winner, facts = final.winner, session.facts
    assert winner is not None
    yield from _batch_notes(session, winner.settings)
    if (command := session.options.command) is not None:
        yield f"start the job by `autotune run {session.options.output} -- {shlex.join(command)}`"
    runs = [winner.outcome.measurement, *final.repeats] if isinstance(winner.outcome, Measured) else []
    if runs and all(NO_EVALUATION in run.warnings for run in runs):
        yield NO_EVALUATION
    growths = [one.growth for run in runs for one in run.evaluations[:1] if one.growth is not None]
    if growths:
        yield f"what is evaluated piles up: {pile_words(max(growths, key=lambda one: one.whole_bytes or 0))}"
    if breaks := list(dict.fromkeys(one for run in runs for one in run.graph_breaks)):
        more = f"; and at {len(breaks) - _BREAKS_SAID} more" if len(breaks) > _BREAKS_SAID else ""
        yield (
            "what is compiled is in pieces, which costs a part of its gain: torch cannot go on at "
            f"{'; '.join(breaks[:_BREAKS_SAID])}{more}"
        )
    for technique in winner.settings.techniques():
        if technique.exactness(facts) == "lossy":
            changes = facts.inference or "function" in technique.affects
            what = "what the model computes" if changes else "the gradient"
            yield f"{technique.name} is lossy for this model: it changes {what}, not only its rounding"
    waited = winner.outcome.measurement.loader_wait if isinstance(winner.outcome, Measured) else 0.0
    if waited >= _MUCH_WAITING:
        no_cache = DataLoading(num_workers=0, cache="host").unavailable(facts)
        yield (
            f"{waited:.0%} of the time is spent waiting for data: a faster dataset or cheaper samples would show"
            f"{'' if no_cache is None else f'. Its epoch is not cached: {no_cache}'}"
        )
    if measured.peak.longest is not None:
        yield f"batch shapes vary: the peak is that of {measured.peak.longest.words()}"
    elif measured.peak.largest_of is not None:
        yield f"batch shapes vary: the peak is that of the largest of {measured.peak.largest_of} batches"
    if reference is not None and not reference.fits and session.budget.of_reference is None:
        yield f"the reference is over {reference.over(session.budget)}; it was measured without enforcement"
    if winner.number == 0 and session.budget.over(measured.peak) is not None:
        yield (
            "the budget is a share of what the job takes as it stands, and admits it as it is: the margin of "
            f"{session.budget.margin:.0%} is kept by other configurations alone"
        )
    found = gain(measured, reference, final.pairs, None)
    if found.low is not None and found.high is not None and not found.is_proven:
        yield f"no gain in speed is proven: it is {found.low:.2f}x to {found.high:.2f}x, at 95 %"
    spread = (measured.samples_per_s.high - measured.samples_per_s.low) / measured.samples_per_s.value / 2
    if spread > _WIDE:
        yield f"speeds vary by ±{spread:.0%}: is the machine shared? Search on a quiet one, or with more --trial-time"
    if not final.repeats:
        yield "measured once, during the search: nothing was repeated in a fresh interpreter. `autotune verify` does"
    elif (unsure := _why_unsure(session, final)) is not None:
        yield unsure
    if reference is not None and winner.number != 0 and not final.reference and final.repeats:
        yield "the reference was measured once, during the search"
    for row in session.study.fallen:
        yield f"trial {row.number} fell when it was measured again: {row.verdict.reason}"
    if (unchanged := _why_unchanged(session)) is not None:
        yield unchanged


def _why_unchanged(session: Session) -> str | None:
    """Why nothing that changes what the model computes can be used; None where something can, or was not allowed."""
    changed = [row for row in session.study.tried if row.settings.affect("function")]
    if not changed:
        return session.no_cut
    if any(row.settings.affect("function") for row in session.feasible):
        return None
    fallen = {row.number: row for row in session.study.fallen}
    ended = [one for row in changed if (one := fallen.get(row.number, row)).verdict.reason is not None]
    mildest = min(ended, key=lambda row: math.inf if row.verdict.lost is None else row.verdict.lost[0])
    what = count(len(changed), "configuration that changes", "configurations that change")
    return f"none of {what} the model can be used; of trial {mildest.number}, {mildest.verdict.reason}"


def _why_unsure(session: Session, final: Final) -> str | None:
    """Why the plan's figures are not sure, or how much other work ran beside them; None where there is nothing to
    say."""
    num_rounds, num_disturbed = len(final.rounds), len(final.rounds) - len(calm(final.rounds))
    most = max((pair.disturbed for pair in final.rounds), default=0.0)
    assert final.winner is not None, "there is a plan"
    if are_sure(final.rounds, session.budget_of(final.winner.number)):
        is_usual = num_rounds - num_disturbed < 2
        return f"other work took up to {most:.0%} of the time: the speeds are what it left" if is_usual else None
    told = f"the figures are not sure after {num_rounds} fresh interpreter{'s' if num_rounds > 1 else ''}"
    if num_disturbed:
        return f"{told}: in {num_disturbed} of them other work took up to {most:.0%} of the time"
    if session.stop.is_set():
        return f"{told}: interrupted"
    return f"{told}: " + ("speeds or peaks differ too much" if num_rounds == MOST_ROUNDS else "the time was used up")


def _batch_notes(session: Session, settings: Settings) -> Iterator[str]:
    facts = session.facts
    if facts.token_flag is not None and settings.batch != session.reference_settings.batch:
        yield (
            "an optimizer step sees as many tokens as before, of other samples: the script puts those together that "
            f"{facts.token_flag.flag} makes room for"
        )
    if facts.effective_batch_assumed:
        yield f"no batch size was given anywhere: the reference's {facts.effective_batch} is assumed"
    if not facts.effective_batch_held and not facts.inference and settings.batch is not None:
        found = settings.batch.num_samples
        if found != facts.effective_batch:
            yield (
                f"an optimizer step sees {found} samples, the reference's {facts.effective_batch}: this changes the "
                "optimization and the learning rate that suits it. --effective-batch holds it"
            )
