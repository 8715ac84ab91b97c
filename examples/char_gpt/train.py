"""Trains the character GPT: with a plan if one is given, and otherwise as model.py stands.

autotune run plan.yaml -- python train.py
python train.py
"""

import argparse
import os
import sys
import time
from itertools import chain, repeat
from pathlib import Path

import torch

import autotune

# Held-out loss of a table that knows the previous character, and nothing before it, is 2.54: below that with some
# distance, attention has learned to look further back.
LEARNED = 2.45


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default=os.environ.get("AUTOTUNE_PLAN"), help="default: the one of `autotune run`")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    arguments = parser.parse_args()

    task = autotune.load_task(str(Path(__file__).with_name("model.py")))
    plan = autotune.load_plan(arguments.plan) if arguments.plan else autotune.Plan(settings={})
    training = autotune.apply(plan, task)
    schedule = torch.optim.lr_scheduler.OneCycleLR(training.optimizer, 3e-3, arguments.steps)

    start, step = time.perf_counter(), 0
    for batch in chain.from_iterable(repeat(training.loader)):
        result = training.step(batch)
        if not result.stepped:
            continue
        step += 1
        if step % 25 == 0:
            print(f"step {step:4d}  loss {result.loss.item():.3f}  {time.perf_counter() - start:5.1f} s", flush=True)
        if step == arguments.steps:
            break
        schedule.step()

    loss = -task.evaluate(training.model)
    print(f"loss on modules that were not trained on: {loss:.3f}")
    if loss > LEARNED:
        sys.exit(f"It has not learned: a loss of {LEARNED} or less was expected.")


if __name__ == "__main__":
    main()
