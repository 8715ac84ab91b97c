"""A dataset that is told of each epoch, and makes other samples in each."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Masked(Dataset):
    def __init__(self):
        self.samples, self.epoch = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)), 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 64

    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(1000 * self.epoch + index)
        return self.samples[index] * (torch.rand(16, generator=drawn) > 0.3), self.samples[index]


torch.manual_seed(0)
loader = DataLoader(Masked(), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(3):
    loader.dataset.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
