"""LBFGS, which calls its closure several times a step."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(64, 8)
loader = DataLoader(TensorDataset(inputs, inputs.square().sum(1)), batch_size=32)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=2)  # more of either turns rounding into 15 %
for _epoch in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
    for x, y in loader:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x)[:, 0], y)
            loss.backward()
            return loss

        optimizer.step(closure)
