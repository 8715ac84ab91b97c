"""A bundle: a folder with one plan for each type of device, and ``bundle.yaml``, which tells them apart."""

from __future__ import annotations

import itertools
import os
import platform
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator

from .errors import PlanError
from .files import read_text, write_text
from .plain_yaml import dump_yaml, explain, read_yaml
from .units import Bytes, size

BUNDLE = "bundle.yaml"
_NEAR = 0.02
"""Relative difference in memory of one type of device: drivers and firmware keep some back."""
_ON_A_CPU = " (CPUs are told apart by name and threads, and not by memory)"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Member(_Section):
    """A type of device, and its plan."""

    plan: str
    """The plan's file, in the bundle's folder."""
    type: Literal["cpu", "cuda"]
    """torch's device type."""
    device: str
    """As the vendor calls it."""
    memory: Annotated[Bytes, Field(gt=0)]
    """All of the device's (of the machine's, for a CPU, which is known by its name and threads)."""
    threads: PositiveInt | None = None
    """On a CPU: threads that torch computes with; tells rows of one device apart."""
    ranks: PositiveInt = 1
    """Processes of the training, each with such a device."""
    samples: PositiveInt
    """In an optimizer step, of each of them."""
    step_s: float = Field(gt=0, allow_inf_nan=False)
    """Seconds that they are expected to take."""

    @field_validator("plan")
    @classmethod
    def _check_is_a_name(cls, plan: str) -> str:
        if Path(plan).name != plan:
            raise ValueError(f"a file in the bundle's folder was expected, but got {plan}")
        return plan

    def describe(self) -> str:
        """For messages: ``NVIDIA H100 80GB HBM3 (79.65 GiB)``."""
        threads = f", {threads_words(self.threads)}" if self.threads else ""
        return f"{self.device} ({size(self.memory)}{threads})"

    def is_like(self, other: Member) -> bool:
        """Whether a process cannot tell which of the two it is on."""
        same = (self.type, self.device, self.threads) == (other.type, other.device, other.threads)
        return same and (self.type == "cpu" or _is_near(self.memory, other.memory))


class Bundle(_Section):
    """Plans for one training over unlike devices."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, populate_by_name=True)

    schema_: Literal["autotune/bundle@1"] = Field(default="autotune/bundle@1", alias="schema")
    """The format's name and version."""
    effective: PositiveInt
    """Samples in an optimizer step, of all processes."""
    plans: Annotated[tuple[Member, ...], Field(min_length=1)]
    """One for each type of device."""

    @field_validator("plans")
    @classmethod
    def _check_apart(cls, plans: tuple[Member, ...]) -> tuple[Member, ...]:
        for one, other in itertools.combinations(plans, 2):
            if one.is_like(other):
                raise ValueError(
                    f"two rows are of one device, {one.describe()}, and no process could tell which of them is its "
                    f"own{_ON_A_CPU if one.type == 'cpu' else ''}: leave one of them out"
                )
        return plans

    def save(self, folder: Path) -> None:
        """Write ``bundle.yaml``.

        Raises:
            PlanError: it cannot be written.
        """
        data = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        write_text(folder / BUNDLE, dump_yaml(data), PlanError)

    @classmethod
    def load(cls, folder: Path) -> Bundle:
        """Read ``bundle.yaml``.

        Raises:
            PlanError: there is none, or it is none.
        """
        path = folder / BUNDLE
        try:
            data = read_yaml(read_text(path, "bundle", PlanError), str(path), PlanError)
            return cls.model_validate(data)
        except FileNotFoundError:
            raise PlanError(
                f"{folder}: a folder without {BUNDLE} is no bundle of plans. Name a plan's file, or a folder that "
                "`autotune search --devices` wrote."
            ) from None
        except ValidationError as error:
            raise PlanError(explain(error, str(path), cls)) from None


def chosen_plan(folder: Path) -> Path:
    """The file of the plan for the device that this process trains on: the current one, or that of its ``LOCAL_RANK``.

    Raises:
        PlanError: there is no bundle, or none of its plans is for this device, or several are.
    """
    bundle = Bundle.load(folder)
    name, memory_bytes, threads = _this_device({one.type for one in bundle.plans})
    near = [
        one
        for one in bundle.plans
        if one.device == name and (memory_bytes is None or _is_near(one.memory, memory_bytes))
    ]
    found = [one for one in near if one.threads in (None, threads)] if len(near) > 1 else near
    if len(found) == 1:
        return folder / found[0].plan
    here = f"{name} ({threads_words(threads or 1) if memory_bytes is None else size(memory_bytes)})"
    raise PlanError(
        f"{folder / BUNDLE}: {'no plan is' if not found else 'more than one plan is'} for this process's device, "
        f"{here}; there are plans for {'; '.join(one.describe() for one in bundle.plans)}. Give "
        "`autotune search --devices` this device too, or name a plan's file."
    )


def threads_words(number: int) -> str:
    """``1 thread``."""
    return f"{number} thread{'' if number == 1 else 's'}"


def _is_near(one_bytes: int, other_bytes: int) -> bool:
    return abs(one_bytes - other_bytes) <= _NEAR * other_bytes


def _this_device(types: set[Any]) -> tuple[str, int | None, int | None]:
    """Name, and memory, bytes, or on a CPU the number of threads, of what this process trains on."""
    import torch  # a driver may stand where there is none

    if "cuda" in types and torch.cuda.is_available():
        number = os.environ.get("LOCAL_RANK", "")
        own = int(number) if number.isdecimal() else torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(own if own < torch.cuda.device_count() else None)
        return str(properties.name), properties.total_memory, None
    return device_name("cpu"), None, torch.get_num_threads()


def device_name(kind: str) -> str:
    """As the vendor calls it: the CPU, or the current CUDA device."""
    if kind == "cuda":
        import torch

        return str(torch.cuda.get_device_properties().name)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
