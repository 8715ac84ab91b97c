"""A probe with an optimizer of its own is fitted in every second epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def fit_probe():
    probe = nn.Linear(32, 4)
    theirs = torch.optim.SGD(probe.parameters(), lr=0.1)
    for x, y in loader:
        with torch.no_grad():
            hidden = encoder(x)
        theirs.zero_grad()
        nn.functional.cross_entropy(probe(hidden), y).backward()
        theirs.step()


torch.manual_seed(0)
inputs = torch.randn(96, 16)
data = TensorDataset(inputs, inputs[:, :4].argmax(1))
encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32))
model = nn.Sequential(encoder, nn.ReLU(), nn.Linear(32, 16))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=8, shuffle=True)
for epoch in range(3):
    for x, _ in loader:
        loss = nn.functional.mse_loss(model(x + 0.1 * torch.randn_like(x)), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if epoch % 2 == 1:
        fit_probe()
