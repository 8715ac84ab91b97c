"""Trains the digit reader: with a plan if one is given, and otherwise as model.py stands.

autotune run plan.yaml -- python train.py
python train.py
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch

import autotune

# Logistic regression reads 91 % of these held-out images.
LEARNED = 0.93


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default=os.environ.get("AUTOTUNE_PLAN"), help="default: the one of `autotune run`")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the 1437 images")
    arguments = parser.parse_args()

    task = autotune.load_task(str(Path(__file__).with_name("model.py")))
    plan = autotune.load_plan(arguments.plan) if arguments.plan else autotune.Plan(settings={})
    training = autotune.apply(plan, task)
    decay = torch.optim.lr_scheduler.LinearLR(training.optimizer, 1.0, 0.01, arguments.epochs)

    start = time.perf_counter()
    for epoch in range(arguments.epochs):
        for batch in training.loader:
            loss = training.step(batch).loss
        decay.step()
        print(f"epoch {epoch + 1:2d}  last loss {loss.item():.3f}  {time.perf_counter() - start:5.1f} s", flush=True)

    accuracy = task.evaluate(training.model)
    print(f"held-out images read right: {accuracy:.1%}")
    if accuracy < LEARNED:
        sys.exit(f"It has not learned: {LEARNED:.0%} or more was expected.")


if __name__ == "__main__":
    main()
