"""Its loss is a vector."""

from healthy import batch_size, build_dataset, build_model  # noqa: F401


def compute_loss(model, batch):
    inputs, targets = batch
    return (model(inputs) - targets).square().flatten()
