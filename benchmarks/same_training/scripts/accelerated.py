"""A loop by Accelerate, which accumulates."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
inputs = torch.randn(64, 16)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1)), batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 24)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for _epoch in range(3):
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x)[:, 0], y))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
