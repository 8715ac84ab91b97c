"""A loop in torchrun's processes, as people write it, each on a card of its own."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

_BATCH = 32
"""Samples in an optimizer step of all processes."""

if __name__ == "__main__":
    card = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(card)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 4, (4096,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, _BATCH // dist.get_world_size(), sampler=sampler)
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 4)).to("cuda")
    model = DistributedDataParallel(net, device_ids=[card])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs.to("cuda")), labels.to("cuda"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
