"""Its forward pass takes 4 GiB of the device at once."""

import torch
from healthy import batch_size, build_dataset, build_model  # noqa: F401


def compute_loss(model, batch):
    taken = torch.zeros(2**30, device=batch[0].device)
    return model(batch[0]).square().mean() + 0 * taken[0]
