"""A dataset that the script changes between epochs by a reference of its own."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Resampled(Dataset):
    def __init__(self):
        self.drawn = torch.Generator().manual_seed(0)
        self.resample()

    def resample(self):
        self.samples = torch.randn(64, 16, generator=self.drawn)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.samples[index], self.samples[index].sum()


torch.manual_seed(0)
data = Resampled()
loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=1)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for _epoch in range(3):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x)[:, 0], y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    data.resample()
