"""``autotune search --devices``: one training over unlike devices, with a plan and a share for each type of them."""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ..batch.jobs import Job, Jobs, check_task, parse_budget
from ..batch.run import Batch
from ..errors import AutotuneError, Interrupted, UnlikeDevices, UserError
from ..plan import Plan
from ..report.printing import listened_to, print_json, tell
from ..search.events import Event, Inspected
from ..search.options import SearchOptions
from ..search.store.results import Results
from ..search.store.storage import default_storage
from ..search.winner.unlike import Share, SharedTraining, check_ranks, check_shareable, slug
from ..search_spaces import load_space
from ..task_file import task_file
from ..techniques import Facts
from ..techniques.parallel import Parallel
from ..workers.devices import split_device
from .batch import Devices, WhatToTune, as_document, close_all, executors_for, preview, run_jobs, tell_of
from .interrupts import interrupts
from .share import bundle_lines, save
from .verify import verify_plan
from .where import Where, default_device, trials

if TYPE_CHECKING:
    from ..workers import Executor

__all__ = ["SEARCHES", "UnlikeType", "search_devices", "search_types", "split_devices"]

SEARCHES = "searches"
"""The folder, in the bundle's, of the searches' own plans, studies and summary."""
_ITEM = re.compile(r"(?P<device>[^*=]+?)\s*(\*\s*(?P<ranks>\d+)\s*)?(=\s*(?P<budget>.+))?")
_EVERY = ("all", "cpu", "cuda")
_ONCE = "Name each type once, with its number of ranks behind it: cuda:A100*2."
_ONE = "For one type, give --device in place of --devices"
_NOT_TAKEN = (
    "flags",
    "scratch",
    "max_quality_drop",
    "recovery_steps",
    "recovery_lr",
    "distill",
    "keep_weights",
    "storage",
    "ablate",
    "progress",
)
"""Options that only a search on one type of device has."""


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


def search_devices(options: SearchOptions, text: str, where: Where, dry_run: bool, json: bool) -> int:
    """Search on each type of device, share the training out, and write the bundle; or say what would be done.

    Args:
        options: of each search; ``output`` is the bundle's folder.
        text: ``--devices``.
        where: what runs the trials.
        dry_run: measure nothing.
        json: print one JSON document.

    Returns:
        The exit code: 0 with a bundle, 130 after a Ctrl-C, else that of a search without a plan.
    """
    _check_options(options)
    types = split_devices(text) or _every(text, options.task, where)
    with executors_for(_jobs(types, options), task_file(options.task), where) as executors:
        return search_types(options, types, executors, dry_run, json)


def search_types(
    options: SearchOptions, types: Sequence[UnlikeType], executors: Devices, dry_run: bool, json: bool
) -> int:
    """As :func:`search_devices`, where the types are known.

    Args:
        options: of each search; ``output`` is the bundle's folder.
        types: of devices.
        executors: by device; the caller closes them.
        dry_run: measure nothing.
        json: print one JSON document.
    """
    ranks, jobs, results = _ranks(types, executors), _jobs(types, options), Results(default_storage("results"))
    what = WhatToTune(task_file(options.task), options.output / SEARCHES, resume=options.resume)
    if dry_run:
        return preview(jobs, what, executors, results, json)

    def check(event: Event) -> None:
        if isinstance(event, Inspected):
            _check_facts(event.facts, options, sum(ranks.values()))

    found, stop = run_jobs(jobs, what, executors, results, check)
    code = tell_of(found, stop.is_set())
    document: dict[str, Any] = {"path": None, **as_document(found)}
    if any(run.plan is None for run in found.jobs):
        tell("No bundle was written, which takes a plan for each type. What was measured is kept: --resume goes on.")
    else:
        studies = [(str(run.options.storage), ranks[run.where]) for run in found.jobs]
        training = SharedTraining.read(studies, options.effective_batch, options.allow_split)
        shares = _shares(training, found, options, executors, stop)
        code = Interrupted.exit_code if stop.is_set() else code
        bundle = save(training, shares, options.output)
        document |= {"path": str(options.output), "bundle": bundle.model_dump(mode="json", by_alias=True)}
        tell("\n".join(bundle_lines(bundle, shares, options.output)))
    if json:
        print_json({"exit_code": code, **document})
    elif document["path"] is not None:
        with listened_to(sys.stdout):
            print(options.output)
    return code


def split_devices(text: str) -> tuple[UnlikeType, ...]:
    """The types of ``cuda:A100*2=70GiB,cuda:T4*4=14GiB``; none of ``all``, ``cpu`` and ``cuda``, which mean every one.

    Raises:
        UserError: it is something else, or names a type twice, one alone, or some of either kind.
    """
    if text in _EVERY:
        return ()
    types = tuple(_type_of(item) for item in re.split(r",\s*(?=cpu|cuda)", text))
    if twice := [name for name, number in Counter(one.name for one in types).items() if number > 1]:
        raise UserError(f"--devices {text}: {twice[0]} is named twice. {_ONCE}")
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
            parse_budget(matched["budget"])
    except ValueError as reason:
        raise UserError(f"--devices {item}: {reason}. Write for example cuda:A100*2=70GiB,cuda:T4*4=14GiB.") from None
    return UnlikeType(matched["device"], ranks, matched["budget"])


def _every(text: str, task: str, where: Where) -> tuple[UnlikeType, ...]:
    """Each type that there is of a kind of device.

    Raises:
        UserError: there is none, or but one.
    """
    kind = default_device() if text == "all" else split_device(text)[0]
    try:
        with trials(where, task, kind) as executor:
            raise UserError(f"--devices {text}: there is one type alone, {executor.device_type}. {_ONE}.")
    except UnlikeDevices as error:
        return tuple(UnlikeType(f"{kind}:{_told_apart(name, error.types)}") for name in error.types)


def _told_apart(name: str, types: Sequence[str]) -> str:
    """The shortest part of a type, between its commas, that no other has; all of it if each is another's too."""
    others = " ".join(other.lower() for other in types if other != name)
    return min((part for part in name.split(", ") if part.lower() not in others), key=len, default=name)


def _check_options(options: SearchOptions) -> None:
    """Refuse what cannot be had over unlike devices, before anything starts.

    Raises:
        UserError: so it is, or there is no such task or space.
    """
    if options.command is not None:
        raise UserError("--devices is for a task file: a script's gradients are its own to weight. Write a task file.")
    defaults = {field.name: field.default for field in fields(SearchOptions)}
    if given := [f"--{name.replace('_', '-')}" for name in _NOT_TAKEN if getattr(options, name) != defaults[name]]:
        raise UserError(f"--devices cannot be had with {', '.join(given)}. Leave that out, or give --device.")
    check_task(options.task)
    load_space(options.space)


def _jobs(types: Sequence[UnlikeType], options: SearchOptions) -> Jobs:
    """The search on each type."""
    share = f"{100 * options.budget_share:.10g}%" if options.budget_share is not None else None
    return Jobs(
        jobs=tuple(
            Job(
                name=one.name,
                task=options.task,
                budget=one.budget or options.budget_bytes or share,
                device=one.device,
                space=options.space,
                trials=options.trials,
                max_time=options.max_time_s,
                trial_time=options.trial_time_s,
                effective_batch=options.effective_batch,
                allow_split=options.allow_split,
                margin=options.margin,
                seed=options.seed,
                sampler=options.sampler,
            )
            for one in types
        )
    )


def _ranks(types: Sequence[UnlikeType], executors: Devices) -> dict[str, int]:
    """How many there are on each type, by device.

    Raises:
        UserError: two names mean one type.
    """
    meant: dict[str, str] = {}
    for one in types:
        type_ = executors[one.device].device_type
        if (other := meant.setdefault(type_, one.device)) != one.device:
            raise UserError(f"--devices: {other} and {one.device} mean one type, {type_}. {_ONCE}")
    return {one.device: one.ranks or executors[one.device].num_slots for one in types}


def _check_facts(facts: Facts, options: SearchOptions, num_ranks: int) -> None:
    """Refuse a task that cannot be shared out, before anything is measured.

    Raises:
        UserError: so it is.
    """
    if not facts.effective_batch_held:
        raise UserError(f"{options.task}: states no batch_size for ranks to share. Give --effective-batch.")
    check_ranks(num_ranks, facts.effective_batch)
    check_shareable(facts, options.task, options.allow_split)


def _shares(
    training: SharedTraining, found: Batch, options: SearchOptions, executors: Devices, stop: threading.Event
) -> list[Share]:
    """Of each type: by what shares take or, once ``stop`` is set, by the searches' trials.

    Raises:
        UserError: the batch cannot be shared out, or a share cannot be measured.
    """

    def measure(number: int, plan: Plan, samples: int) -> float:
        run, batch = found.jobs[number], plan.settings.batch
        assert batch is not None, "it states the share"
        took_s = _seconds(plan, samples, executors[run.where], options)
        tell(f"{run.job.name}: {samples} of {training.effective} samples in {took_s:.4g} s ({batch.describe()})")
        return took_s

    try:
        with interrupts(stop, lambda: close_all(executors)):
            if not stop.is_set():
                tell("measuring shares of the batch")
                return training.even_out(measure)
    except AutotuneError:
        if not stop.is_set():
            raise
    return training.expected()


def _seconds(plan: Plan, samples: int, executor: Executor, options: SearchOptions) -> float:
    """What a share takes one process alone, in fresh interpreters.

    Raises:
        UserError: it is over the budget, or cannot be measured.
    """
    alone = plan.settings.model_copy(update={"parallel": Parallel()})
    as_plan = plan.model_copy(update={"settings": alone})
    found = verify_plan(as_plan, options.task, executor, lambda event: None, options.trial_time_s)
    if found.measured is None or not found.holds:
        raise UserError(f"{options.task}: a share of {samples} samples: {found.over_budget}. Give a larger --margin.")
    return samples / found.measured.samples_per_s.value
