"""Accumulation by a flag that does not divide its loss, and dropout."""

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
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
for _epoch in range(args.epochs):
    for number, (x, y) in enumerate(DataLoader(data, args.batch_size, shuffle=True), 1):
        nn.functional.mse_loss(model(x), y).backward()
        if number % args.grad_accum == 0:
            optimizer.step()
            optimizer.zero_grad()
