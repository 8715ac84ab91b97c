"""Loops over DistributedDataParallel as people write them, each in its own way; prints losses and weights."""

import argparse
import contextlib
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autotune

parser = argparse.ArgumentParser()
parser.add_argument("kind")
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.last(nn.functional.gelu(self.first(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 1)
        self.spare = nn.Linear(8, 1) if args.kind == "unused" else None

    def forward(self, x, spare=False):
        for block in self.blocks:
            x = block(x)
        return self.spare(x) if spare else self.head(x)


def shared(net):
    unused, static = args.kind == "unused", args.kind == "static"
    return DistributedDataParallel(net, find_unused_parameters=unused, static_graph=static)


dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
rank = dist.get_rank()
net = Net()
num_samples = {"uneven": 5, "no_sync": 16}.get(args.kind, 12)
data = TensorDataset(torch.randn(num_samples, 8), torch.randn(num_samples, 1))
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=2, sampler=sampler)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
if args.kind == "prepare, then share":
    net, optimizer, loader = autotune.prepare(net, optimizer, loader)
model = shared(net)
if args.kind == "share, then prepare":
    model, optimizer, loader = autotune.prepare(model, optimizer, loader)

losses, drawn = [], []
accumulate = 2 if args.kind == "no_sync" else 1
every = list(loader)[: len(loader) - rank] if args.kind == "join" else loader  # the second has fewer
with model.join() if args.kind == "join" else contextlib.nullcontext():
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for place, (x, y) in enumerate(every):
            adds = (place + 1) % accumulate != 0
            with model.no_sync() if adds else contextlib.nullcontext():
                out = model(x, spare=args.kind == "unused" and place % 2 == 1)
                loss = nn.functional.mse_loss(out, y) / accumulate
                loss.backward()
            losses.append(loss.item())
            drawn.append(len(x))
            if not adds:
                optimizer.step()
                optimizer.zero_grad()
weights = [p.sum().item() for p in net.parameters()]
print(json.dumps({"losses": losses, "weights": weights, "drawn": drawn, "patched": "forward" in vars(net.blocks[0])}))
