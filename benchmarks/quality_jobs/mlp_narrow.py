"""mlp.py with half the width and half the batch."""

import os
import runpy
from pathlib import Path

WIDE = runpy.run_path(str(Path(__file__).with_name("mlp.py")))
WIDE["build_model"].__globals__["WIDTH"] = 512
build_model, build_dataset, compute_loss, build_optimizer, scores, evaluate = (
    WIDE[name] for name in ("build_model", "build_dataset", "compute_loss", "build_optimizer", "scores", "evaluate")
)
JUDGED, HELD_OUT = WIDE["JUDGED"], WIDE["HELD_OUT"]
batch_size = 128
weights = os.environ.get("QUALITY_WEIGHTS")
train_steps = 1200
recovery_steps = 100
