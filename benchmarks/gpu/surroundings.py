"""What the card and its driver say, and whether this package hears the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from autotune.estimates.cards import on_device
from autotune.units import MIB

from .check import Check, Found, Skipped
from .place import Place, handle

_FALLBACKS_MIB = 32
_NUM_TRACES, _NUM_BLOCKS = 5, 400


def _surroundings(place: Place) -> Found:
    """Names by this package's lists, by CUDA and in a trial."""
    from autotune.workers.devices import visible_gpus

    said = place.alone(what_torch_says)
    listed = [gpu.name for gpu in visible_gpus()]
    in_trial = place.facts(place.language).device
    agree = in_trial.name == said["name"] and any(said["name"] in name for name in listed)
    figures = {**said, **_what_nvml_says(), "listed": listed, "in_trial": in_trial.name}
    card = f"{said['name']}, {said['memory_mib']} MiB, compute capability {said['capability']}"
    versions = f"torch {said['torch']}, CUDA {said['cuda']}, cuDNN {said['cudnn']}, driver {said['driver']}"
    where = ", ".join(kind for kind in ("wsl", "container", "mig") if figures.get(kind)) or "no container, no MIG"
    return Found(f"{card}; {versions}; {where}; {said['free_mib']} MiB free; names agree: {agree}", agree, figures)


def what_torch_says() -> dict[str, Any]:
    """Of the card that trials run on, and this machine."""
    import torch

    from autotune.device_memory.context import driver_version

    torch.zeros(1, device="cuda")
    properties = torch.cuda.get_device_properties()
    free, total = torch.cuda.mem_get_info()
    kernel = Path("/proc/version")
    return {
        "name": properties.name,
        "memory_mib": total >> 20,
        "free_mib": free >> 20,
        "capability": f"{properties.major}.{properties.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": driver_version(),
        "wsl": kernel.exists() and "microsoft" in kernel.read_text().lower(),
        "container": Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
    }


def _what_nvml_says() -> dict[str, Any]:
    try:
        import pynvml

        found = handle()
        return {
            "mig": _asked(lambda: bool(pynvml.nvmlDeviceGetMigMode(found)[0])),
            "others": len(pynvml.nvmlDeviceGetComputeRunningProcesses(found)),
            "clock_mhz": _asked(lambda: pynvml.nvmlDeviceGetClockInfo(found, pynvml.NVML_CLOCK_SM)),
            "temperature_c": _asked(lambda: pynvml.nvmlDeviceGetTemperature(found, pynvml.NVML_TEMPERATURE_GPU)),
            "power_limit_mw": _asked(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(found)),
            "usual_power_limit_mw": _asked(lambda: pynvml.nvmlDeviceGetPowerManagementDefaultLimit(found)),
        }
    except Skipped as reason:
        return {"nvml": str(reason)}


def _asked(ask: Any) -> Any:
    import pynvml

    try:
        return ask()
    except pynvml.NVMLError:
        return None


def _context(place: Place) -> Found:
    """What a process is charged beside its tensors, by NVML's list of processes and by both ways without it."""
    stages: dict[str, dict[str, int | None]] = place.alone(contexts, all_bytes=_all_bytes())
    shown = [row["shown"] for row in stages.values()]
    last = stages["after a step"]
    if shown[-1] is None:
        raise Skipped("NVML does not show this process's memory, so that nothing can be compared")
    apart = max(abs((last[way] or 0) - shown[-1]) for way in ("used", "free"))
    told = ", ".join(f"{name} {row['shown']} MiB" for name, row in stages.items())
    known = on_device(place.facts(place.language).device, has_convolutions=True)["context"]
    is_within = apart <= _FALLBACKS_MIB and known.low <= shown[-1] * MIB <= known.high
    told += f"; planned for: {known.low // MIB} to {known.high // MIB} MiB"
    return Found(f"{told}; the ways without NVML's list are off by {apart} MiB at most", is_within, stages)


def _all_bytes() -> int:
    """The card's memory by NVML, with what its driver keeps."""
    import pynvml

    return int(pynvml.nvmlDeviceGetMemoryInfo(handle()).total)


def contexts(all_bytes: int) -> dict[str, dict[str, int | None]]:
    """MiB of this process's context as it grows, by each way to read it; NVML counts what the card's driver keeps among
    all bytes, too."""
    import torch

    from autotune.device_memory import context

    used_before = context._used_by_all()
    found: dict[str, dict[str, int | None]] = {}

    def note(stage: str) -> None:
        torch.cuda.synchronize()
        reserved = torch.cuda.memory_reserved()
        shown, used = context._shown_for_this_process(), context._used_by_all()
        free, _ = torch.cuda.mem_get_info()
        rows = {
            "shown": None if shown is None else shown - reserved,
            "used": None if used is None or used_before is None else used - used_before - reserved,
            "free": all_bytes - free - reserved - (used_before or 0),
        }
        found[stage] = {way: None if value is None else value >> 20 for way, value in rows.items()}

    torch.zeros(1, device="cuda")
    note("bare")
    weight = torch.randn(64, 64, device="cuda", requires_grad=True)
    (weight @ weight).sum().backward()  # type: ignore[no-untyped-call]
    note("after cuBLAS")
    images = torch.randn(2, 8, 16, 16, device="cuda", requires_grad=True)
    torch.nn.functional.conv2d(images, torch.randn(8, 8, 3, 3, device="cuda")).sum().backward()  # type: ignore[no-untyped-call]
    note("after cuDNN")
    torch.optim.AdamW([weight]).step()
    note("after a step")
    return found


def _allocator(place: Place) -> Found:
    """The allocator that predictions replay, beside the card's own, block by block."""
    rows = place.alone(allocated, num_traces=_NUM_TRACES, num_blocks=_NUM_BLOCKS)
    equal = sum(row["ours"] == row["cuda"] for row in rows)
    return Found(
        f"{equal} of {len(rows)} traces reserve the same bytes after each step", equal == len(rows), {"rows": rows}
    )


def allocated(num_traces: int, num_blocks: int) -> list[dict[str, list[int]]]:
    """Bytes reserved after every tenth allocation or free of random sizes, by each of the two."""
    import torch

    from autotune.estimates.allocators.cuda_caching import CachingAllocator

    rows = []
    for seed in range(num_traces):
        torch.cuda.empty_cache()
        chooser, ours, blocks = random.Random(seed), CachingAllocator(), []
        before = torch.cuda.memory_reserved()
        row: dict[str, list[int]] = {"ours": [], "cuda": []}
        for at in range(num_blocks):
            if blocks and chooser.random() < 0.45:
                block, tensor = blocks.pop(chooser.randrange(len(blocks)))
                ours.free(block)
                del tensor
            else:
                size = int(2 ** chooser.uniform(8, 25))
                blocks.append((ours.allocate(size), torch.empty(size, dtype=torch.uint8, device="cuda")))
            if at % 10 == 9:
                row["ours"].append(ours.reserved_bytes)
                row["cuda"].append(torch.cuda.memory_reserved() - before)
        rows.append(row)
        blocks.clear()
    return rows


CHECKS = (
    Check("surroundings", "names by this package, by CUDA and in a trial agree", _surroundings),
    Check(
        "context",
        f"within {_FALLBACKS_MIB} MiB by each way; after a step, what is planned for on such a card",
        _context,
    ),
    Check("allocator's rules", "equal bytes reserved, step by step, in five traces", _allocator),
)
