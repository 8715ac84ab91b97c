"""What this machine offers a search, what will be skipped and why, and how to get what is missing."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, get_args

from pydantic import ValidationError
from rich.console import Group, RenderableType
from rich.text import Text

from ..distribution import VERSION, conflict, requirement
from ..internals import broken
from ..measure.exports.types import ONNX_PACKAGES, missing_for_onnx
from ..techniques import TECHNIQUES, Device, Facts, Technique
from ..techniques.allocator import INSTALLATION, installed_allocators
from ..units import MIB, size
from ..workers.devices import installed_gpus, torch_builds, visible_gpus, why_no_gpu
from ..workers.trial.environment import THREAD_VARIABLES
from .tables import rows_table

_PRUNES = "torch-pruning"
_PACKAGES = ("torch", "optuna", "ray", "pydantic", "nvidia-ml-py", _PRUNES, *ONNX_PACKAGES)


def examine() -> dict[str, Any]:
    """Everything ``autotune doctor`` says, as plain data. Imports torch and touches the devices."""
    import torch

    from ..measure.device import inspect_device
    from ..techniques.support.facts import num_processors

    has_cuda = torch.cuda.is_available() and why_no_gpu() is None
    types: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda") if has_cuda else ("cpu",)
    devices = [inspect_device(kind) for kind in types]
    gpus = list(_gpus()) if has_cuda else []
    return {
        "devices": [device.model_dump(exclude_none=True) for device in devices],
        "gpus": gpus,
        "versions": {"python": platform.python_version(), "autotune": VERSION, **_versions()},
        "threads": {
            "processors": num_processors(),
            "torch": torch.get_num_threads(),
            **{name: os.environ.get(name) for name in THREAD_VARIABLES},
        },
        "allocators": {name: name in installed_allocators() for name in INSTALLATION},
        "executors": {"local": _local(), "ray": "ready" if _version("ray") else "not installed: pip install ray"},
        "skipped": [row for device in devices for row in _skipped(device)],
        "missing": [
            {"feature": _goes_by(feature.name), "reason": reason, "without": feature.without}
            for feature, reason in broken()
        ],
        "advice": [*_advice(has_cuda), *(_advice_on(gpus) if has_cuda else ())],
    }


def _goes_by(feature: str) -> str:
    """The techniques that go by a feature; its own name where none does."""
    return ", ".join(name for name, one in TECHNIQUES.items() if one.goes_by == feature) or feature


def explain(found: dict[str, Any]) -> RenderableType:
    """The same for people."""
    parts: list[RenderableType] = []
    sections = {
        "Devices": [(row["type"], _device(row)) for row in found["devices"]],
        "GPUs": [(row["uuid"], _gpu(row)) for row in found["gpus"]],
        "Versions": [(name, value or "not installed") for name, value in found["versions"].items()],
        "Threads": [(name, str(value if value is not None else "not set")) for name, value in found["threads"].items()],
        "Allocators": [(name, "installed" if there else "missing") for name, there in found["allocators"].items()],
        "Executors": list(found["executors"].items()),
        "Skipped here": [(row["device"], f"{row['setting']}: {row['reason']}") for row in found["skipped"]],
        "Missing here": [(row["feature"], f"{row['reason']}: {row['without']}") for row in found["missing"]],
        "Advice": [("-", text) for text in found["advice"]],
    }
    for title, rows in sections.items():
        if rows:
            parts += [Text(f"{title}", style="bold"), rows_table(rows), Text()]
    return Group(*parts[:-1])


def _versions() -> dict[str, str | None]:
    return {name: _version(name) for name in _PACKAGES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _local() -> str:
    whole = hasattr(os, "fork") and hasattr(os, "pidfd_open") and platform.system() == "Linux"
    return "ready" if whole else "ready, but every trial starts a new interpreter: fork servers need Linux"


def _skipped(device: Device) -> Iterator[dict[str, str]]:
    """Settings that no task can have on this device, in training or inference; what depends on the task is not judged
    here."""
    infers = _any_task(device)
    trains = infers.model_copy(update={"inference": False})
    for name, technique in TECHNIQUES.items():
        for setting in _kinds(technique):
            reason = setting.unavailable(infers)
            if reason is not None and setting.unavailable(trains) is not None:
                yield {"device": device.type, "technique": name, "setting": setting.describe(), "reason": reason}


def _kinds(technique: type[Technique]) -> Iterator[Technique]:
    field = technique.model_fields.get("kind")
    for kind in get_args(field.annotation) if field else ():
        with suppress(ValidationError):  # a kind that needs more than its name, such as the blocks of a model
            yield technique.model_validate({"kind": kind})


def _any_task(device: Device) -> Facts:
    """A task that has everything, so that only the device can be the reason for what cannot be had."""
    return Facts(
        fingerprint="",
        device=device,
        torch_version="",
        num_threads=2,
        host_memory_bytes=device.memory_bytes,
        num_parameters=1,
        num_trainable=1,
        num_blocks=2,
        block_name="Block",
        conv_dims=(2,),
        dataset_length=1,
        dataset_kind="map",
        dataset_bytes=1,
        dataset_deterministic=True,
        stackable=True,
        shapes_vary=False,
        shards_by_worker=True,
        loader_options={},
        loader_samples_per_s={},
        effective_batch=1,
        effective_batch_held=False,
        effective_batch_assumed=False,
        linear_features=1024,
        frozen_bytes=64 * MIB,
        attention=("sdpa", "eager", "flex_attention"),
        num_feed_forwards=1,
        reversible_blocks=("blocks",),
        inference=True,
        linear_numbers=1,
        float8_numbers=1,
        codable_bytes=64 * MIB,
        split_error=0.0,
        allow_split=True,
        optimizer="AdamW",
        optimizer_states=2,
        table_numbers=25_600_000,
        optimizer_implementations=("for_loop", "foreach", "fused"),
        allocators=installed_allocators(),
    )


def _advice(has_cuda: bool) -> Iterator[str]:
    from ..measure.device import check_device
    from ..measure.errors import DeviceLost

    if found := conflict():
        yield found
    if not has_cuda:
        missing = [name for name in INSTALLATION if name not in installed_allocators()]
        yield from (f"{name}: {INSTALLATION[name]}. On a CPU it decides what a job is charged." for name in missing)
        if missing:
            yield "A library that was unpacked anywhere is found where LD_LIBRARY_PATH names its folder."
    if missing := missing_for_onnx():
        yield f"`autotune export --to onnx` lacks {', '.join(missing)}: pip install {requirement('onnx')}."
    if _version(_PRUNES) is None:
        yield f"`pruning` lacks {_PRUNES}: pip install {requirement('pruning')}."
    if (why := why_no_gpu()) is not None:
        yield f"Searches measure the CPU: {why}"
    elif not has_cuda and "cuda" in torch_builds() and visible_gpus():
        try:
            check_device()
        except DeviceLost as lost:
            yield str(lost)
    for name in THREAD_VARIABLES:
        if name in os.environ:
            yield f"{name}={os.environ[name]} is handed on to trials; unset it to let torch use every processor."


def _device(row: dict[str, Any]) -> str:
    parts = [row["name"], size(row["memory_bytes"])]
    if "capability" in row:
        parts.append("compute capability {}.{}".format(*row["capability"]))
    parts.append("bf16" if row["bf16"] else "no native bf16")
    if "driver" in row:
        parts.append(f"driver {row['driver']}")
    return ", ".join(parts)


def _gpus() -> Iterator[dict[str, Any]]:
    """Those that a trial can have, and who else uses them."""
    from ..device_memory.nvml import ask
    from ..measure.others import users

    def free_bytes(uuid: str, nvml: Any) -> int:
        return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(uuid)).free)

    for gpu in visible_gpus():
        free = ask(partial(free_bytes, gpu.uuid))
        others = [{"pid": one.pid, "name": one.name, "bytes": one.num_bytes} for one in users(gpu.uuid)]
        yield {"uuid": gpu.uuid, "type": gpu.type, "free_bytes": free, "others": others}


def _gpu(row: dict[str, Any]) -> str:
    free = "free memory unknown" if row["free_bytes"] is None else f"{size(row['free_bytes'])} free"
    others = ", ".join(f"{one['name']} (pid {one['pid']}) {size(one['bytes'])}" for one in row["others"])
    return f"{row['type']}, {free}; {f'also used by {others}' if others else 'nobody else is seen on it'}"


def _advice_on(gpus: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What follows for searches."""
    import torch

    from ..device_memory.cap import lends_host_memory
    from ..device_memory.context import is_told

    types = sorted({row["type"] for row in gpus})
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and chosen != ",".join(row["uuid"] for row in gpus):
        named = ", ".join(f"{row['uuid']} ({row['type']})" for row in gpus)
        yield f"CUDA_VISIBLE_DEVICES={chosen} is {named}, as CUDA counts: each trial has its own of them by that name."
    elif left_out := [gpu.type for gpu in installed_gpus() if gpu.uuid not in {row["uuid"] for row in gpus}]:
        yield f"Not visible, and not used: {', '.join(left_out)}."
    if len(types) > 1:
        yield f"Unlike GPUs: a search wants one type, such as --device 'cuda:{types[0]}'. There are {'; '.join(types)}."
    elif len(gpus) > 1:
        yield f"A search runs {len(gpus)} trials at once, one on each GPU, each on processors of its own."
    if any(row["uuid"].startswith("MIG-") for row in gpus):
        yield "Instances of a split GPU (MIG) train one process each: no trial has several of them."
    if any(row["others"] for row in gpus):
        yield (
            "Others use a GPU here: a trial waits some seconds for the memory of its budget, and is lost without it; "
            "speeds are marked as disturbed. End them before a search."
        )
    if torch.cuda.get_device_properties().is_integrated:
        yield (
            "This GPU shares the machine's memory (Jetson, GB10): what the system and other programs take is missing "
            "to trials, and peaks go by how the machine's used memory grows."
        )
    elif not is_told():
        yield (
            "The driver does not show what this process takes (containers, WSL): peaks go by how the GPU's used memory "
            "grows, and are off where others take or give back memory meanwhile. Search where nothing else uses it."
        )
    if lends_host_memory():
        yield (
            "WSL: Windows' driver lends host memory where the GPU's runs out. Trials are held to what is free on the "
            "GPU; a job is held to its plan's budget. Close what draws on the screen to have more."
        )
