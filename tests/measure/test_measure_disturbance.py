"""What other work takes of a training's time is seen by its windows, and by what its threads waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from autotune.measure.timing import disturbance
from autotune.measure.timing.disturbance import OtherWork, missing_share
from autotune.measure.timing.speed import Window, settled

WATCHES = """
import time
from autotune.measure.timing.disturbance import OtherWork
watch, ends_s = OtherWork(), time.monotonic() + 1.0
watch.open()
while time.monotonic() < ends_s:
    pass
watch.close()
print(*watch.seconds())
"""
BUSY = "import time\nend = time.monotonic() + 600\nwhile time.monotonic() < end: pass"


def window(seconds: float = 0.1, cpu_s: float = 0.19, wait_s: float = 0.0, num_samples: int = 32) -> Window:
    return Window(seconds, num_samples, 1, wait_s, seconds, cpu_s)


def test_windows_alike_miss_nothing():
    assert missing_share([window()] * 10) == 0.0
    assert missing_share([window(cpu_s=0.19), window(cpu_s=0.18)] * 5) == 0.0


def test_a_pause_is_time_without_processor_time():
    """Nine windows of 0.1 s, and one that a pause of 30 s is in: of 31 s, 30 are missing."""
    assert missing_share([window()] * 9 + [window(seconds=30.1)]) == pytest.approx(30 / 31)


def test_processors_that_are_taken_are_missing():
    """Half of the windows had half of their processor time: half of that half is missing."""
    assert missing_share([window(), window(cpu_s=0.095)] * 5) == pytest.approx(0.25)


def test_waiting_for_data_is_the_trainings_own():
    starved = window(seconds=0.2, wait_s=0.1)
    assert missing_share([window(), starved] * 5) == 0.0


@pytest.mark.slow
def test_a_process_that_takes_turns_with_another_on_one_processor_is_disturbed():
    """Both want the processor all of the time: each waits about half of it."""
    pinned = f"import os\nos.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})\n"
    other = subprocess.Popen([sys.executable, "-c", pinned + BUSY])
    try:
        watching = subprocess.run([sys.executable, "-c", pinned + WATCHES], capture_output=True, text=True, check=True)
    finally:
        other.kill()
        other.wait()
    assert float(watching.stdout) > 0.1


@pytest.fixture
def watched(monkeypatch):
    """Windows of 1/8 s in which this process's threads waited, and others and it computed, by tables."""

    def watched(waited_s, others_s, pauses=()):
        now_s, waits_s, busy_s = [0.0], [0.0], [0.0]
        monkeypatch.setattr(disturbance, "perf_counter", lambda: now_s[0])
        monkeypatch.setattr(disturbance, "_waited_s", lambda: waits_s[0])
        monkeypatch.setattr(disturbance, "_look", lambda: disturbance._Look(busy_s[0] + now_s[0], now_s[0]))
        watch = OtherWork()
        watch.end()
        watch._pauses.found.extend(pauses)
        for waited, others in zip(waited_s, others_s, strict=True):
            watch.open()
            now_s[0], waits_s[0], busy_s[0] = now_s[0] + 0.125, waits_s[0] + waited, busy_s[0] + others
            watch.close()
        return watch.seconds()

    return watched


def test_what_was_waited_is_others_as_far_as_they_computed(watched):
    """Of 0.1 s waited in half a second, others computed for 0.05: half of each window's waiting is theirs."""
    assert watched([0.02, 0.03, 0.0, 0.05], [0.05, 0, 0, 0]) == pytest.approx([0.01, 0.015, 0, 0.025])


def test_threads_that_wait_for_each_other_are_disturbed_by_nobody(watched):
    assert watched([0.05] * 8, [0.0] * 8) == [0.0] * 8


def test_others_that_take_no_processor_away_disturb_nobody(watched):
    assert watched([0.0] * 10, [0.1] * 10) == [0.0] * 10


def test_each_spell_is_borne_out_by_itself(watched):
    """Half a second with other work, then one in which this process's threads waited for each other alone."""
    assert watched([0.05] * 8, [0.1] * 4 + [0.0] * 4) == pytest.approx([0.05] * 4 + [0.0] * 4)


def test_a_pause_is_in_the_windows_that_it_fell_into(watched):
    """From the middle of the second window to the middle of the third, of which 0.1 s was lost."""
    found = watched([0.0] * 4, [0.0] * 4, pauses=[disturbance.Pause(0.1875, 0.3125, 0.1)])
    assert found == pytest.approx([0.0, 0.05, 0.05, 0.0])


PAUSED = """
import sys
from autotune.measure.timing.disturbance import Pauses
watch = Pauses()
print(flush=True)
sys.stdin.read()
watch.end()
print(sum(pause.seconds for pause in watch.found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_process_that_was_stopped_while_it_waited_has_paused(is_stopped):
    """Two seconds of SIGSTOP are seen, though it was asleep; sleeping by itself is no pause."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    child = subprocess.Popen([sys.executable, "-c", PAUSED], text=True, **pipes)
    child.stdout.readline()
    if is_stopped:
        child.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    child.send_signal(signal.SIGCONT)
    found, _ = child.communicate()
    assert (float(found) > 1.0) == is_stopped


def test_what_its_own_children_take_is_its_own():
    """A loader worker that computes for half a second is no other work."""
    before = disturbance._look().own_s
    spins = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ntime.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", spins], stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        assert disturbance._look().own_s - before > 0.4
    finally:
        child.kill()
        child.wait()


def test_windows_that_begin_slowly_are_left_out():
    slow, usual = [window(num_samples=n) for n in (8, 16, 24)], [window(num_samples=n) for n in (32, 33) * 10]
    assert settled([*slow, *usual]) == usual


def test_windows_alike_are_all_kept_and_never_fewer_than_half():
    assert settled([window()] * 8) == [window()] * 8
    drifting = [window(num_samples=n) for n in range(10, 30)]
    assert len(settled(drifting)) >= 10
