"""An average of the weights, by torch's own class, and gradients clipped."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(72, 16)
train, validation = TensorDataset(inputs[:64], inputs[:64].sum(1)), inputs[64:]
model = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for _epoch in range(3):
    for x, y in DataLoader(train, batch_size=8, shuffle=True):
        loss = nn.functional.huber_loss(model(x)[:, 0], y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        average.update_parameters(model)
    average.eval()
    with torch.inference_mode():
        print(average(validation).mean().item())
