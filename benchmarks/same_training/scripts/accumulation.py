"""Accumulation by a flag; the loss is divided."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--grad-accum", type=int, default=1)
args = parser.parse_args()
torch.manual_seed(0)
inputs = torch.randn(64, 16)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
for _epoch in range(3):
    for number, (x, y) in enumerate(DataLoader(data, args.batch_size, shuffle=True), 1):
        loss = nn.functional.mse_loss(model(x), y) / args.grad_accum
        loss.backward()
        if number % args.grad_accum == 0:
            optimizer.step()
            optimizer.zero_grad()
