"""Blocks with dropout, evaluated after each epoch; the best state is saved."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(80, 16)
data = TensorDataset(inputs, inputs[:, :4].argmax(1))
train, held_out = torch.utils.data.random_split(data, [64, 16])
blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2)) for _ in range(3)]
model = nn.Sequential(nn.Linear(16, 32), *blocks, nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
loader, validation = DataLoader(train, 8, shuffle=True), DataLoader(held_out, 16)
best = float("inf")
for _epoch in range(3):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        loss = sum(nn.functional.cross_entropy(model(x), y).item() for x, y in validation)
    if loss < best:
        best = loss
        torch.save(model.state_dict(), "best.pt")
print(best)
