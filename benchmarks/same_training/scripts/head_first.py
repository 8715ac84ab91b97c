"""The head is trained before the rest, each by an optimizer of its own."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(96, 16)
loader = DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=8, shuffle=True)
blocks = [nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(2)]
body, head = nn.Sequential(nn.Linear(16, 32), *blocks), nn.Linear(32, 4)
model = nn.Sequential(body, head)


def train(parameters, num_epochs):
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    for _epoch in range(num_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


body.requires_grad_(False)
train(head.parameters(), 1)
body.requires_grad_(True)
train(model.parameters(), 2)
