"""An Accelerate loop: `python -m benchmarks.trainer_jobs.accelerate_job cnn plan.yaml OUT STEPS`."""

from __future__ import annotations

import sys

from accelerate import Accelerator
from torch.utils.data import DataLoader

import autotune
from autotune.integrations.accelerate import arguments, prepare

from .models import ACCUMULATE, MICRO, build_dataset, build_model, build_optimizer, task_of
from .timed import Timed

__all__ = ["main", "task_of"]


def main(case: str, path: str, out: str, num_steps: str) -> None:
    """Train with the plan."""
    plan = autotune.load_plan(path)
    accelerator, model = Accelerator(cpu=True, **arguments(plan)), build_model(case)
    loader = DataLoader(build_dataset(case), batch_size=MICRO[case], shuffle=True)
    three = prepare(plan, accelerator, model.train(), build_optimizer(model.parameters()), loader)
    model, optimizer, loader = accelerator.prepare(*three)
    with Timed(out, int(num_steps), MICRO[case] * ACCUMULATE):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])
