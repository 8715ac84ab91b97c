"""A device that Ray gives to one at a time, and the actor beside it that runs trials there."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..errors import Caught
from .local import LocalSlot
from .outcome import OUTCOME, Lost, Outcome
from .placement import Place
from .process import adopt_orphans, end_orphans
from .request import REQUEST, TrialRequest
from .trial.environment import THREAD_VARIABLES

_GRACE_S = 300.0
"""How long over a trial's deadline an actor may stay silent."""
_CLOSE_S = 30.0
VISIBLE = "CUDA_VISIBLE_DEVICES"
PLACED: dict[str, Any] = {"max_concurrency": 2, "num_cpus": 0}
"""Of an actor: it runs a trial, and is closed meanwhile; its device is not Ray's to count for it."""
_NODE_LABEL = "ray.io/node-id"
_FORCED_BY_RAY = frozenset({*THREAD_VARIABLES, "PYTHONBREAKPOINT", "PYTHONUNBUFFERED"})
"""Variables that a Ray worker has and a job would not."""


class TrialActor:
    """Lives in a Ray worker; its fork servers and their trials are that worker's descendants. It has no device by
    itself."""

    def __init__(self, base: Mapping[str, str] | None = None, processors: Sequence[int] = ()) -> None:
        adopt_orphans()  # of a fork server that was killed
        mine = os.environ
        if base is None:
            base = {name: value for name, value in mine.items() if name not in _FORCED_BY_RAY}
        self._base, self._processors = base, processors
        self._slots: dict[str, LocalSlot] = {}

    def is_up(self) -> None:
        """Answers once it is."""

    def run(self, request: str, gpus: str) -> str:
        """JSON in, JSON out: objects would tie the driver's version to the worker's.

        Args:
            request: what to run.
            gpus: as ``CUDA_VISIBLE_DEVICES`` names them.
        """
        return self._slot_on(gpus).run(REQUEST.validate_json(request)).model_dump_json(by_alias=True)

    def _slot_on(self, gpus: str) -> LocalSlot:
        if gpus not in self._slots:
            own = {**self._base, VISIBLE: gpus} if gpus else self._base
            self._slots[gpus] = LocalSlot(own, processors=self._processors)
        return self._slots[gpus]

    def close(self) -> None:
        """End the processes of all slots."""
        for slot in [*self._slots.values()]:
            slot.close()


def gpus_here() -> str:
    """Those that Ray gave this worker, whose environment it may have been told to leave as it is."""
    return ",".join(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))


class Device:
    """What a node has for one trial at a time. Ray keeps it for who has asked, with no process there."""

    def __init__(self, node: str, needs: Mapping[str, float]) -> None:
        self._node, self.needs = node, needs
        self.is_held = False
        self._group: Any = None
        self._gpus: str | None = None
        self._lock = threading.Lock()

    def take(self, within_s: float) -> bool:
        """Ask for it, and wait so long."""
        with self._lock:
            if self._group is None:
                self._group = placement_group([dict(self.needs)], bundle_label_selector=[{_NODE_LABEL: self._node}])
            group = self._group
        with Caught():  # Ray raises a plain Exception where it is given back meanwhile
            if group.wait(int(within_s)):
                with self._lock:
                    self.is_held = self._group is group
        return self.is_held

    def give_back(self) -> None:
        """Also where it is still waited for."""
        with self._lock:
            group, self._group, self._gpus, self.is_held = self._group, None, None, False
        if group is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(group)

    def gpus(self) -> str:
        """Which GPUs it is: Ray tells a worker alone.

        Raises:
            RayError: its node has gone.
        """
        if self._gpus is None:
            number = self.needs.get("GPU", 0)
            asked = ray.remote(gpus_here).options(
                num_cpus=0, num_gpus=number, scheduling_strategy=PlacementGroupSchedulingStrategy(self._group)
            )
            self._gpus = ray.get(asked.remote()) if number else ""
        return self._gpus


class RaySlot:
    """A device, and an actor beside it, which is started when it is needed, and again after it was lost."""

    def __init__(
        self,
        name: str,
        node: str,
        device: Device | None = None,
        options: Mapping[str, Any] = PLACED,
        place: Place | None = None,
    ) -> None:
        """
        Args:
            name: of the device.
            node: that it is on.
            device: None where nobody else asks Ray for it.
            options: of the actor.
            place: what its trials have; None is what its worker has, less Ray's part.
        """
        self.name, self.node, self.device, self.place = name, node, device, place
        self._options = options
        self._actor: Any = None
        self._is_up = False
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def has_device(self) -> bool:
        """Whether its device is its own now."""
        return self.device is None or self.device.is_held

    def gets_device(self, within_s: float) -> bool:
        """Whether it has its device within so long; where it is closed meanwhile, the next trial tells."""
        return self._is_closed or self.device is None or self.device.take(within_s)

    def leave_device(self) -> None:
        """Give it back. The actor stays: to start another takes seconds."""
        if self.device is not None:
            self.device.give_back()

    def run(self, request: TrialRequest) -> Outcome:
        """Run a trial under this slot's actor: ``Lost`` where the actor, its worker or its machine was lost, its
        environment cannot be set up, or the slot is closed."""
        try:
            actor = self._living_actor()
            if actor is None:
                return Lost(message="the slot is closed")
            if not self._is_up:
                ray.get(actor.is_up.remote())
                self._is_up = True
            gpus = "" if self.device is None else self.device.gpus()
            reference = actor.run.remote(request.model_dump_json(by_alias=True), gpus)
            return OUTCOME.validate_json(ray.get(reference, timeout=request.latest_s + _GRACE_S))
        except RayError as error:
            self._kill()
            end_orphans()  # of a worker that was killed
            return Lost(message=f"Ray: {str(error).strip().splitlines()[-1]}")

    def close(self) -> None:
        """End the actor with everything that came of it, and give the device back."""
        with self._lock:
            self._is_closed = True
        if self._actor is not None:
            if self._is_up:
                with contextlib.suppress(RayError):  # it has died already
                    ray.get(self._actor.close.remote(), timeout=_CLOSE_S)
            self._kill()
        self.leave_device()

    def _living_actor(self) -> Any:
        with self._lock:
            if self._is_closed:
                return None
            if self._actor is None:
                self._actor = ray.remote(TrialActor).options(**self._options).remote(*(self.place or ()))
            return self._actor

    def _kill(self) -> None:
        with self._lock:
            actor, self._actor, self._is_up = self._actor, None, False
            if actor is not None:
                ray.kill(actor)
