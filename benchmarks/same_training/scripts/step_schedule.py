"""A learning rate by step: OneCycleLR, which changes the momentum too."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(64, 16)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1)), batch_size=8, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.005, total_steps=3 * len(loader))
for _epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x)[:, 0], y).backward()
        optimizer.step()
        schedule.step()
