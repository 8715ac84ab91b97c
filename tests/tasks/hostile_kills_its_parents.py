"""It kills the process above it that ``generations`` beside it names, 1 its parent, once."""

import os
import signal
from pathlib import Path

import healthy
from healthy import batch_size, build_dataset, compute_loss  # noqa: F401


def build_model():
    generations = Path(__file__).with_name("generations")
    if not generations.exists():
        return healthy.build_model()
    victim = os.getpid()
    for _ in range(int(generations.read_text())):
        victim = int(Path(f"/proc/{victim}/stat").read_text().rpartition(")")[2].split()[1])
    generations.unlink()
    os.kill(victim, signal.SIGKILL)
    while True:
        signal.pause()
