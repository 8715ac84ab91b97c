"""What the process and its descendants are charged."""

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autotune.measure import MeasureOptions
from autotune.measure.memory import Charge
from autotune.measure.processes import beside_bytes, descendants, own_live_bytes, own_peak_bytes
from autotune.plan import Budget, Plan
from autotune.techniques import Settings
from autotune.workers import MeasureRequest
from autotune.workers.local import LocalExecutor

TASKS = Path(__file__).parents[1] / "tasks"
MIB = 2**20
linux = pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs Linux's /proc")


@pytest.fixture
def child():
    """Start ``python -c`` with a program that prints a line when it is ready, and then waits for its stdin to close."""
    started = []

    def start(program):
        command = [sys.executable, "-c", program + "\nprint('ready', flush=True)\nimport sys; sys.stdin.read()"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def test_the_peak_holds_what_is_gone():
    """VmHWM of a fresh process: 64 MiB written and freed stay in it."""
    program = (
        "from autotune.measure.processes import own_peak_bytes, own_live_bytes\n"
        "before = own_peak_bytes()\n"
        "block = bytearray(b'x') * 2**26\n"
        "del block\n"
        "print(own_peak_bytes() - before)\n"
    )
    grown = int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    assert 60 * MIB <= grown <= 80 * MIB


@linux
def test_live_memory_follows_an_allocation_and_its_end():
    before = own_live_bytes()
    block = mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.write(b"x" * (32 * MIB))
    during = own_live_bytes()
    block.close()
    assert during - before >= 30 * MIB
    assert during - own_live_bytes() >= 30 * MIB


@linux
def test_a_childs_own_pages_are_beside_this_process(child):
    child("pass")
    before = beside_bytes()
    child("block = bytearray(b'x') * 2**25")
    child("pass")
    assert 30 * MIB <= beside_bytes() - before <= 44 * MIB


@linux
@pytest.mark.parametrize(
    ("then", "low", "high"),
    [
        ("pass", 0, 12),  # the parent maps all of it
        ("del block", 30, 44),  # the children hold it together
        ("block[:] = bytes(2**25)", 30, 44),  # the parent has pages of its own, and they the old ones
    ],
)
def test_what_children_share_counts_once_and_not_at_all_while_their_parent_has_it(child, then, low, high):
    """32 MiB from before two forks, as loader workers start with all that the training process has."""
    program = (
        "import os, sys\n"
        "block = bytearray(b'x') * 2**25\n"
        "end = os.pipe()\n"
        "for _ in range(2):\n"
        "    if os.fork() == 0:\n"
        "        os.close(end[1])\n"
        "        os.read(end[0], 1)\n"
        "        os._exit(0)\n"
        f"{then}"
    )
    assert low * MIB <= beside_bytes(child(program).pid, 0) <= high * MIB


@linux
def test_a_batch_that_lies_ready_and_that_nobody_maps_counts(child):
    """32 MiB in shared memory without a name, which a worker has open: they are in no resident set."""
    program = (
        "import os\n"
        "read, write = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    file = os.open(f'/dev/shm/{os.getpid()}', os.O_RDWR | os.O_CREAT)\n"
        "    os.unlink(f'/dev/shm/{os.getpid()}')\n"
        "    os.write(file, b'x' * 2**25)\n"
        "    os.write(write, b'x')\n"
        "    os.read(os.pipe()[0], 1)\n"
        "os.read(read, 1)"
    )
    process = child(program)
    try:
        assert 30 * MIB <= beside_bytes(process.pid, 0) <= 44 * MIB
    finally:
        for pid in descendants(process.pid):
            os.kill(pid, signal.SIGKILL)


@linux
def test_descendants_reach_grandchildren(child):
    program = (
        "import subprocess, sys\n"
        "inner = subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'], stdin=subprocess.PIPE)\n"
    )
    process = child(program)
    found = list(descendants())
    assert process.pid in found
    assert [pid for pid in descendants(process.pid) if pid in found]


def test_a_process_that_has_ended_has_nothing_beside_it():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert beside_bytes(process.pid) == 0


@linux
def test_a_worker_that_was_seen_stays_in_the_peak(child):
    charge = Charge(torch.device("cpu"))
    process = child("block = bytearray(b'x') * 2**25")
    charge.sample_descendants()
    process.stdin.close()
    process.wait()
    assert charge.peak().process >= own_peak_bytes() + 30 * MIB


def test_a_budget_is_exceeded_only_with_its_margin():
    charge = Charge(torch.device("cpu"))
    peak = charge.peak().process
    assert charge.exceeds(Budget(limit=peak, margin=0.03))
    assert not charge.exceeds(Budget(limit=2 * peak, margin=0.03))
    assert not charge.exceeds(Budget(limit=None))
    assert not charge.exceeds(None)


def test_the_peak_says_how_many_batches_it_is_the_largest_of():
    assert Charge(torch.device("cpu"), largest_of=64).peak().largest_of == 64


_CUDA_PROGRAM = """
import torch
from autotune.device_memory.cap import hold
from autotune.measure.memory import Charge
hold(2 * 2**30, 0.03, is_enforced=True)
kept = []
try:
    while True:
        kept.append(torch.ones(2**24, device="cuda"))
except torch.OutOfMemoryError:
    peak = Charge(torch.device("cuda")).peak()
    print(peak.process, peak.reserved, peak.allocated)
"""


@pytest.mark.parametrize(("host", "on_cpu", "on_cuda"), [(None, 8, None), (4, 4, 4), (16, 8, 16)])
def test_the_watchdog_holds_the_hosts_memory_and_on_a_cpu_the_smaller_of_both_budgets(host, on_cpu, on_cuda):
    """On CUDA, --budget is the device's, and the host's memory is no part of it."""
    limit = None if host is None else host * 2**30
    plan = Plan(settings=Settings(), budget=Budget(limit=8 * 2**30, host=limit))
    options = MeasureOptions(parity_batch=8)
    requests = [MeasureRequest(id="1", task="m.py", device=d, plan=plan, options=options) for d in ("cpu", "cuda")]
    wanted = [None if one is None else one * 2**30 * 5 // 4 for one in (on_cpu, on_cuda)]
    assert [request.memory_limit_bytes for request in requests] == wanted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fresh", [False, True])
def test_a_cuda_trial_is_held_to_its_budget(fresh: bool):
    """One that allocates 4 GiB at once comes back out of memory under 2 GiB, and measured under 16 GiB."""
    kinds = []
    with LocalExecutor(device="cuda") as executor:
        for limit in (2 * 2**30, 16 * 2**30):
            plan = Plan(settings=Settings(), budget=Budget(limit=limit, device="cuda"))
            options = MeasureOptions(trial_time_s=0.5, parity_batch=8)
            task = str(TASKS / "needs_4_gib.py")
            request = MeasureRequest(id="1", task=task, device="cuda", plan=plan, options=options, fresh=fresh)
            kinds.append(executor.submit(request).result().kind)
    assert kinds == ["out_of_memory", "measured"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_process_is_refused_what_a_device_of_the_budgets_size_would_refuse():
    done = subprocess.run([sys.executable, "-c", _CUDA_PROGRAM], capture_output=True, text=True, check=True)
    process, reserved, allocated = map(int, done.stdout.split())
    assert allocated <= reserved < process
    assert 0.9 * 2 * 2**30 <= process <= 1.03 * 2 * 2**30


@linux
def test_what_a_training_takes_is_told_beside_imports_and_data():
    """A fresh process: importing takes 256 MiB for a moment and keeps 64 MiB, data take 32 MiB, training 48 MiB for a
    moment: the whole peak is that of importing, and training's own is 48 MiB."""
    program = (
        "import mmap, torch\n"
        "from autotune.measure.memory import Base, Charge\n"
        "from autotune.task import Task\n"
        "def block(mib):\n"
        "    made = mmap.mmap(-1, mib * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "    for _ in range(mib):\n"
        "        made.write(b'x' * 2**20)\n"
        "    return made\n"
        "kept, once = block(64), block(192)\n"
        "once.close()\n"
        "before = Charge(torch.device('cpu')).peak().process\n"
        "base = Base()\n"
        "task = Task(build_model=list, build_dataset=lambda: block(32), compute_loss=max)\n"
        "data = base.with_data(task).build_dataset()\n"
        "block(48).close()\n"
        "found = Charge(torch.device('cpu'), base=base).peak()\n"
        "print(found.process - before, found.above_base)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    more, above = map(int, ended.stdout.split())
    assert 0 <= more <= MIB
    assert 46 * MIB <= above <= 54 * MIB


@linux
def test_a_trial_tells_its_peak_beside_imports_and_data(local_executor):
    request = MeasureRequest(
        id="one",
        task=str(TASKS / "healthy.py"),
        plan=Plan(settings=Settings()),
        options=MeasureOptions(trial_time_s=0.2, parity_batch=None),
        deadline_s=60.0,
        device="cpu",
    )
    peak = local_executor.ask(request).measurement.peak
    assert 0 < peak.above_base < peak.process
