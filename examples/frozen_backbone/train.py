"""Trains the adapters and the head on the digits 5 to 9, after `python pretrain.py`.

autotune run plan.yaml -- python train.py
python train.py
"""

import argparse
import os
import sys
from pathlib import Path

import autotune

# With the adapters frozen too, the head alone reads 92 % of these held-out images after three epochs, 93 % after four.
LEARNED = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default=os.environ.get("AUTOTUNE_PLAN"), help="default: the one of `autotune run`")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the 716 images")
    arguments = parser.parse_args()

    task = autotune.load_task(str(Path(__file__).with_name("model.py")))
    plan = autotune.load_plan(arguments.plan) if arguments.plan else autotune.Plan(settings={})
    training = autotune.apply(plan, task)

    for epoch in range(arguments.epochs):
        for batch in training.loader:
            loss = training.step(batch).loss
        print(f"epoch {epoch + 1}  last loss {loss.item():.3f}", flush=True)

    accuracy = task.evaluate(training.model)
    print(f"held-out images, of digits from 5 on, that are read right: {accuracy:.1%}")
    if accuracy < LEARNED:
        sys.exit(f"It has not learned: {LEARNED:.0%} or more was expected.")


if __name__ == "__main__":
    main()
