"""The model is exported before it is trained, to be drawn."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
blocks = [nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(2)]
model = nn.Sequential(nn.Linear(16, 32), *blocks, nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
print(len(torch.export.export(model, (torch.randn(8, 16),)).graph.nodes), "nodes")
for _epoch in range(3):
    for x, y in DataLoader(data, batch_size=8, shuffle=True):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
