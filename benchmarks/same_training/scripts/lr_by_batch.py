"""A learning rate that goes by the batch flag alone, and a warm-up that counts micro-batches."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--grad-accum", type=int, default=1)
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()
torch.manual_seed(0)
inputs = torch.randn(64, 16)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
rate = 0.02 * args.batch_size / 8
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
seen = 0
for _epoch in range(args.epochs):
    for x, y in DataLoader(data, args.batch_size, shuffle=True):
        seen += 1
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, seen / 12)
        (nn.functional.mse_loss(model(x), y) / args.grad_accum).backward()
        if seen % args.grad_accum == 0:
            optimizer.step()
            optimizer.zero_grad()
