"""Runs a script as a trial: observes it until there is an outcome, writes that, and ends the script. Torch is left to
the script to import, which may set variables before that."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ...errors import UserError
from ...measure.processes import end_with
from ...plan import Plan
from ...ranks import own_gpu, this_rank
from ...techniques import Settings
from ...workers import Chosen, Failed, Inspected, Lost, Measured, Outcome, OutOfMemory
from ...workers.request import InspectRequest, MeasureRequest, PredictRequest
from ...workers.trial.folder import TrialFolder
from ...workers.trial.resuming import is_short, resumed_script
from ..command import FENCES
from ..plan.applied import InScript
from ..refusal import Refused, is_success
from ..scratch import Scratch, work_in
from .several import Several

if TYPE_CHECKING:
    from ..plan.hooks import ScriptHooks
    from .timing import ScriptTiming

_GRACE_S = 5.0
"""How long a script may take to end, with its own ``finally`` and ``atexit``, once it has been measured."""


_OFFLINE = (
    "Trials are offline (HF_HUB_OFFLINE=1), so that none of them uploads anything. Run the script once by itself, "
    "which keeps what it downloads, and leave out flags such as --push_to_hub; or search with HF_HUB_OFFLINE=0."
)
_NO_INPUT = "A script has no standard input here: give it by its flags what it asks for."
_NOT_HERE = ("OfflineModeIsEnabled", "LocalEntryNotFoundError")
"""Of huggingface_hub, which need not be installed."""
_COPY = (
    "the script trains in a process that it has forked (multiprocessing, os.fork), and is measured in its own. Have "
    "torchrun start its processes: `torchrun --nproc-per-node 2 train.py`."
)


class ScriptTrial:
    """One request, answered by the script that runs in this process."""

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: the trial's folder.
        """
        self._folder, self._process, self._ranks = TrialFolder(path), os.getpid(), this_rank()
        if self._folder.read_outcome() is not None:
            raise SystemExit(1)  # torchrun --max-restarts: it has failed
        self._several = Several(self._folder, self._ranks) if self._ranks.size > 1 else None
        if self._several is not None:
            end_with(os.getppid())  # torchrun, killed, leaves its processes behind
            if self._ranks.rank == 0:
                self._folder.write_speaker()
        self._stack = self._folder.write_stacks() if self._ranks.rank == 0 else None
        request = self._folder.read_request()
        assert isinstance(request, InspectRequest | MeasureRequest | PredictRequest), "a script answers no other"
        self._request = request
        self._began_s = time.monotonic()
        self._is_answered = False
        self._finish: Callable[[], Outcome | None] = lambda: None
        self._hooks: ScriptHooks | None = None
        self._timing: ScriptTiming | None = None
        self._seed = request.seed + self._ranks.rank
        random.seed(self._seed)  # what the script does not seed itself is alike in all trials
        self._obstacle: str | None = None
        """Why no epoch is ended early: the script may write there what it writes at an epoch's end."""
        self._work_in_scratch(request.scratch)
        self._within = Path.cwd()
        self._tell("running the script, up to its first optimizer step")

    def _work_in_scratch(self, kind: Scratch) -> None:
        try:
            stays = work_in(self._folder.path / "scratch", kind, is_first=self._ranks.rank == 0)
            self._obstacle = None if stays is None else f"{stays}, so that no epoch of it was ended to see the next"
        except (UserError, OSError) as error:
            self._write(Failed(message=str(error)))
            raise SystemExit(1) from None

    def _tell(self, phase: str) -> None:
        """What the trial is doing; of several processes, what the first is."""
        if self._ranks.rank == 0:
            self._folder.write_phase(phase)

    def seed_numpy(self) -> None:
        """It is there: what the script draws from it, and does not seed itself, is alike in all trials."""
        sys.modules["numpy"].random.seed(self._seed % 2**32)

    def arrive(self) -> None:
        """Torch is there: begin to look."""
        import torch

        from ...measure.memory import Charge
        from ...measure.others import take_card
        from ...measure.timing.compile_time import CompileTime
        from ...training.apply_pieces import hold_to_budget
        from ..observer import Observer
        from ..plan.hooks import ScriptHooks
        from .look import Look
        from .timing import ScriptTiming

        request = self._request
        torch.manual_seed(self._seed)
        if request.device == "cuda":
            if isinstance(request, MeasureRequest):
                take_card(request.plan, request.options, own_gpu)
                if request.options.enforce:
                    hold_to_budget(request.plan, enforce=True)
            else:
                take_card(None, None, own_gpu)
        plan = request.plan if isinstance(request, MeasureRequest) else Plan(settings=Settings())
        if (
            isinstance(request, MeasureRequest)
            and (differs := plan.settings.parallel.other_size(self._ranks.size)) is not None
        ):
            raise Refused(differs)
        in_script = InScript(plan, Path("the trial's plan"))
        hooks = ScriptHooks(in_script)
        self._hooks = hooks
        if self._ranks.rank:
            hooks.observer = Observer()
        elif isinstance(request, MeasureRequest):
            CompileTime(self._folder.write_compiling)  # which puts the trial's deadline off
            timing = ScriptTiming(request, self._began_s, self._answer, self._tell, self._obstacle)
            self._timing, self._finish, hooks.observer = timing, timing.finish, timing
        elif isinstance(request, PredictRequest):
            from .choosing import Choosing

            hooks.observer = Choosing(request, in_script, self._answer, hooks.remove)
        else:
            look = Look(
                request, in_script, self._ranks.size, self._answer, self._folder.path / "scratch", self._obstacle
            )
            self._finish, hooks.observer = look.finish, look
        if self._several is not None:
            self._several.begin(Charge(torch.device(request.device)))
            hooks.stepped = self._several.follow(hooks.observer.stepped, self._end)
        os.register_at_fork(after_in_child=lambda: setattr(hooks, "stepped", self._refuse_copy))
        hooks.install()

    def ended(self, error: BaseException | None) -> None:
        """The script came to its end by itself, or this did it."""
        if self._is_answered or os.getpid() != self._process or self._folder.read_outcome() is not None:
            return
        self._write(self._of_ending(error))

    def _of_ending(self, error: BaseException | None) -> Outcome | None:
        if isinstance(error, Refused):
            return Failed(message=error.reason)
        if self._request.device == "cuda" and self._hooks is not None and not sys.modules["torch"].cuda.device_count():
            return _without_card()
        if is_success(error):
            if self._ranks.rank:
                return None
            return self._finish() or Failed(message=self._why_too_soon())
        assert error is not None, "that is a success"
        from ...workers.trial.failure import outcome_of

        outcome = outcome_of(error, self._request.device)
        if not isinstance(outcome, OutOfMemory) and self._ends_early() and (known := self._finish()) is not None:
            return known  # an epoch that is ended early is not what each script was written for
        if isinstance(outcome, Failed) and (what_to_do := _what_to_do(error)) is not None:
            outcome = outcome.model_copy(update={"message": f"{outcome.message.rstrip('.')}. {what_to_do}"})
        return outcome

    def _ends_early(self) -> bool:
        """Whether an epoch is ended early, so that what the script does is no longer as it was written."""
        return isinstance(self._request, InspectRequest) or (self._timing is not None and self._timing.is_timed)

    def _why_too_soon(self) -> str:
        """The script ended by itself, before there was an outcome."""
        if self._hooks is None:
            return "the script ended without importing torch: give it the flags that have it train"
        if self._hooks.has_stepped:
            return "the script ended before it could be measured: have it train for longer, by its own flags"
        return f"the script ended without an optimizer step in this process. {self._hooks.why_no_step()}"

    def _refuse_copy(self, optimizer: object, num_backwards: int) -> NoReturn:
        """A fork of this process trains: nobody could say when it and its like have been measured."""
        self._folder.write_first_outcome(Failed(message=_COPY))
        os.kill(self._process, signal.SIGTERM)  # it may wait for this one, or for others
        raise SystemExit(1)

    def _answer(self, outcome: Outcome) -> NoReturn:
        """End the script with it; of several processes, once all have made one more step."""
        if self._several is not None:
            self._several.hold(outcome)
        self._end(outcome)

    def _end(self, outcome: Outcome | None) -> NoReturn:
        """Write the outcome and end the script as by ``sys.exit``, within some seconds; a forked copy ends at once."""
        failed = not isinstance(outcome, Measured | Inspected | Chosen | None)
        code = int(failed and self._several is not None)  # torchrun ends the others, which may wait for this process
        if os.getpid() == self._process:
            self._write(outcome)
            threading.Thread(target=_end_soon, args=(code,), name="autotune-grace", daemon=True).start()
        raise SystemExit(code)

    def _write(self, outcome: Outcome | None) -> None:
        """None is of a process that another answers for."""
        self._is_answered = True
        if outcome is None:
            assert self._several is not None, "alone, a process answers for itself"
            self._several.write_peak()
            return
        if isinstance(outcome, Measured) and isinstance(self._request, MeasureRequest):
            self._folder.write_measured()  # what a script does at its end is no part of it
            outcome = self._with_resuming(outcome, self._request)
        if self._several is None:
            self._folder.write_outcome(outcome)
        else:
            self._folder.write_first_outcome(self._several.together(outcome))

    def _with_resuming(self, measured: Measured, request: MeasureRequest) -> Measured:
        """With the peak of a process of its own, if the script goes on by itself from what it has saved. On a card that
        would want memory that this one has."""
        life, measurement = request.options.life, measured.measurement
        is_alone = self._several is None and request.device == "cpu" and self._obstacle is None and request.fresh
        if life is None or not is_alone or self._timing is None or not self._timing.has_saved:
            return measured
        if not is_short(measurement, life.most_s):
            return measured
        found = resumed_script(measurement, request, self._folder, self._within)
        return measured.model_copy(update={"measurement": found})


def _without_card() -> Outcome:
    """The script saw no card: its own doing, or the driver's."""
    from ...measure.device import check_device
    from ...measure.errors import DeviceLost

    try:
        check_device()
    except DeviceLost as lost:
        if "No CUDA GPUs are available" not in str(lost):  # (torch 2.13, c10/cuda/CUDAFunctions.cpp)
            return Lost(message=str(lost))
    return Failed(
        message="the script sees no CUDA device (CUDA_VISIBLE_DEVICES = "
        f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')!r}), but --device is cuda. Let it see one, or search with "
        "--device cpu."
    )


def _what_to_do(error: BaseException) -> str | None:
    """Of an error that comes of how a trial is run."""
    if isinstance(error, EOFError) and "reading a line" in str(error):  # input()
        return _NO_INPUT
    return _OFFLINE if _wants_hub(error) else None


def _wants_hub(error: BaseException) -> bool:
    """Whether it asked a hub of Hugging Face's for what is not on this machine."""
    from ...training.out_of_memory import chain

    is_offline = os.environ.get("HF_HUB_OFFLINE") == FENCES["HF_HUB_OFFLINE"]
    return is_offline and any(type(link).__name__ in _NOT_HERE for link in chain(error))


def _end_soon(code: int) -> None:
    time.sleep(_GRACE_S)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
