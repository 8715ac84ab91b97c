"""The model is traced by torch.jit before it is trained, as a graph for TensorBoard is."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def block(width):
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())


torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 3, 12, 12), torch.randint(0, 4, (64,)))
model = nn.Sequential(nn.Conv2d(3, 8, 3), block(8), block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
graph = torch.jit.trace(model, torch.randn(1, 3, 12, 12))
print(len(list(graph.graph.nodes())), "nodes")
for _epoch in range(3):
    for x, y in DataLoader(data, batch_size=16, shuffle=True):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
