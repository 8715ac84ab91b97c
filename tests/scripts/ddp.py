"""A loop in torchrun's processes, as people write it: prints each step's loss."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--grad-accum", type=int, default=1)
parser.add_argument("--steps", type=int, default=100_000_000)
parser.add_argument("--fails-at", type=int, default=-1)
parser.add_argument("--pids", default=os.devnull)
args = parser.parse_args()
with open(args.pids, "a") as file:
    print(os.getpid(), file=file)

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 12), torch.randint(0, 4, (256,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, args.batch_size, sampler=sampler)
net = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 4))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

done = epoch = 0
while done < args.steps:
    sampler.set_epoch(epoch)
    for place, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x), y) / args.grad_accum
        loss.backward()
        if (place + 1) % args.grad_accum:
            continue
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if done == args.fails_at and dist.get_rank() == 1:
            raise ValueError("mine")
        if done == args.steps:
            break
    epoch += 1
