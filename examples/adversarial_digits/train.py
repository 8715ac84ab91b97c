"""Finds the pattern, in a loop of one's own: the plan comes in pieces.

autotune run plan.yaml -- python train.py
python train.py
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from model import TARGET

import autotune

# Without a pattern, about 1 % of the images that are no 8 are read as one.
LEARNED = 0.7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default=os.environ.get("AUTOTUNE_PLAN"), help="default: the one of `autotune run`")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the 1437 images")
    arguments = parser.parse_args()

    task = autotune.load_task(str(Path(__file__).with_name("model.py")))
    plan = autotune.load_plan(arguments.plan) if arguments.plan else autotune.Plan(settings={})
    training = autotune.apply(plan, task)

    for epoch in range(arguments.epochs):
        for (images,) in training.loader:
            with training.forward_context():
                logits = training.model(images)
                loss = F.cross_entropy(logits, logits.new_full((len(logits),), TARGET, dtype=torch.long))
            training.backward(loss)
            training.optimizer_step()
        print(f"epoch {epoch + 1}  last loss {loss.item():.3f}", flush=True)

    fooled = task.evaluate(training.model)
    print(f"held-out images, none of them an {TARGET}, that are read as one: {fooled:.1%}")
    if fooled < LEARNED:
        sys.exit(f"The pattern does not work: {LEARNED:.0%} or more was expected.")


if __name__ == "__main__":
    main()
