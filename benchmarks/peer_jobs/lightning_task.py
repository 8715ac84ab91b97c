"""The job of lightning_images.py as a task: `autotune search lightning_task.py`."""

from lightning_images import Classifier, build_loader

import autotune

task = autotune.from_lightning(Classifier, build_loader)
