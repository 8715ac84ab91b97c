"""Which devices of a machine or a cluster trials run on: those of one type, told apart by name and memory, and CPUs by
their processors too."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..bundle import device_name
from ..device_memory.nvml import ask
from ..errors import TrialsLost, UnlikeDevices, UserError
from ..measure.processes import read
from ..techniques.support.facts import num_processors
from .devices import torch_builds, type_text, visible_gpus, why_no_gpu

_TOPOLOGY = Path("/sys/devices/system/cpu")


def types_here(kind: Literal["cpu", "cuda"]) -> list[str]:
    """This machine's devices by name and memory: its CPU with all of its memory and the processors that a process may
    use, or each GPU that it may."""
    if kind == "cuda":
        return [gpu.type for gpu in visible_gpus()]
    memory = type_text(device_name("cpu"), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    number = num_processors()
    return [f"{memory}, {number} processor{'' if number == 1 else 's'}"]


class Place(NamedTuple):
    """What trials on a device, or on several that go to one trial, have."""

    environment: dict[str, str]
    processors: tuple[int, ...] = ()
    """Theirs alone; empty are all."""


def slots_here(
    kind: Literal["cpu", "cuda"], wanted: str | None, gpus_per_trial: int | None = 1
) -> tuple[str, dict[str, Place]]:
    """The type of this machine's devices that is meant, and by the name of one, or of several that go to one trial,
    what trials there have.

    Args:
        kind: torch's device type.
        wanted: part of the type.
        gpus_per_trial: one for each process; None is all that there are.

    Raises:
        UserError: there are too few of it, or none that can be measured on.
        UnlikeDevices: several are meant.
    """
    if kind == "cpu":
        return choose_type({"cpu": types_here(kind)}, kind, wanted)[0], {"cpu": Place({})}
    gpus = visible_gpus()
    if (not gpus or "cuda" not in torch_builds()) and (why := why_no_gpu()) is not None:
        raise UserError(f"device cuda: {why}")
    type_, chosen = choose_type({gpu.uuid: [gpu.type] for gpu in gpus}, kind, wanted)
    size = trial_size(gpus_per_trial, len(chosen), type_)
    if size > 1 and any(gpu.startswith("MIG-") for gpu in chosen):
        raise UserError(
            f"the job trains in {size} processes, each on a GPU of its own, and a process of CUDA's sees one instance "
            f"of a split GPU (MIG) alone, as {type_} is. Train in one process, or have GPUs that are not split."
        )
    groups = [*zip(*[iter(chosen)] * size, strict=False)]  # what is left over is too few
    shares = _shares([_near(group[0]) for group in groups])
    return type_, {
        ",".join(group): Place({"CUDA_VISIBLE_DEVICES": ",".join(group)}, share)
        for group, share in zip(groups, shares, strict=True)
    }


def _near(gpu: str) -> frozenset[int]:
    """Of the processors that this process may use, those that the driver calls near a GPU; all where it calls none."""
    mine = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset[int]()
    num_words = max(mine, default=0) // 64 + 1

    def asked(nvml: Any) -> list[int]:
        return list(nvml.nvmlDeviceGetCpuAffinity(nvml.nvmlDeviceGetHandleByUUID(gpu), num_words))

    words = ask(asked) or []
    return mine & {64 * at + bit for at, word in enumerate(words) for bit in range(64) if word >> bit & 1} or mine


def _shares(near: Sequence[frozenset[int]]) -> list[tuple[int, ...]]:
    """Whole cores for each trial that may run at once, as even as they go; nothing where there is but one, or there are
    too few cores. Else the loaders' workers of all of them run over each other."""
    if any(one & other and one != other for one in near for other in near):
        near = [frozenset().union(*near)] * len(near)
    cores = {
        every: sorted({tuple(sorted(_core_of(number) & every)) for number in every}) for every in dict.fromkeys(near)
    }
    together = Counter(near)
    if len(near) == 1 or any(len(cores[every]) < number for every, number in together.items()):
        return [()] * len(near)
    taken: Counter[frozenset[int]] = Counter()
    found = []
    for every in near:
        at, size = taken[every], len(cores[every]) / together[every]
        mine = cores[every][int(at * size) : int((at + 1) * size)]
        taken[every] += 1
        found.append(tuple(sorted(number for core in mine for number in core)))
    return found


def _core_of(number: int) -> frozenset[int]:
    """The processors of one core, by any of them: ``0,64`` or ``0-1``.

    Source: https://docs.kernel.org/admin-guide/cputopology.html
    """
    text = read(_TOPOLOGY / f"cpu{number}" / "topology" / "thread_siblings_list").strip()
    parts = [part.partition("-") for part in text.split(",") if part]
    return frozenset({number}.union(*(range(int(low), int(high or low) + 1) for low, _, high in parts)))


def trial_size(gpus_per_trial: int | None, most: int, type_: str) -> int:
    """How many GPUs each trial has.

    Args:
        gpus_per_trial: one for each process; None is all that there are.
        most: that a machine has.
        type_: of them.

    Raises:
        UserError: they are too few.
    """
    if gpus_per_trial is not None and gpus_per_trial > most:
        raise UserError(
            f"the job trains in {gpus_per_trial} processes, each on a GPU of its own, but a trial has {most} x {type_} "
            "on a machine here. Start fewer processes, or search where there are as many GPUs."
        )
    return gpus_per_trial or most


def check_nodes(address: str, meant: Collection[str], answered: Collection[str], others: Collection[str]) -> None:
    """Tell a cluster whose nodes have not come yet, or have just gone, from one that lacks the device.

    Args:
        address: of the cluster.
        meant: its nodes that have such devices.
        answered: those of them that have said which.
        others: its nodes that could run anything.

    Raises:
        TrialsLost: the cluster has no nodes for trials, or none of them has answered.
    """
    if answered or (others and not meant):
        return
    why = f"none of its {len(meant)} nodes for trials answers" if meant else "it has no node yet that runs trials"
    raise TrialsLost(f"the Ray cluster at {address}: {why}. Wait for its nodes, and try again.")


def choose_type(
    found: Mapping[str, Sequence[str]], kind: Literal["cpu", "cuda"], wanted: str | None
) -> tuple[str, dict[str, int]]:
    """The type of device that is meant, and how many each place has.

    Args:
        found: by place, such as a node, its devices' types. A place that has several counts for none: which of them a
            trial gets there cannot be chosen.
        kind: torch's device type.
        wanted: part of a type, in upper or lower case; None where there is but one.

    Raises:
        UserError: there is none of it.
        UnlikeDevices: several are meant.
    """
    types = Counter(row[0] for row in found.values() for _ in row if len(set(row)) == 1)
    there = "; ".join(f"{number} x {name}" for name, number in sorted(types.items())) or "none"
    if mixed := sorted(place for place, row in found.items() if len(set(row)) > 1):
        there += f"; not counting unlike ones in one machine ({', '.join(mixed)}), of which Ray gives a trial any"
    asked = kind if wanted is None else f"{kind}:{wanted}"
    meant = [name for name in types if wanted is None or wanted.lower() in name.lower()]
    if not meant:
        raise UserError(f"device {asked}: there is no such device. There are: {there}.")
    if len(meant) > 1:
        raise UnlikeDevices(
            f"device {asked}: means unlike devices, whose measurements do not go together. There are: {there}. Name "
            f"one type, such as {kind}:{min(meant)}.",
            sorted(meant),
        )
    return meant[0], {place: len(row) for place, row in found.items() if set(row) == {meant[0]}}
