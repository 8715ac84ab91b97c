"""It imports what is not there."""

import no_such_module  # noqa: F401
from healthy import build_dataset, build_model, compute_loss  # noqa: F401
