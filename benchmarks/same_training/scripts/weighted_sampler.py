"""Samples are drawn by weight, and cropped at random."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler


class Images(Dataset):
    def __init__(self):
        self.images = torch.randn(64, 3, 14, 14, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 64

    def __getitem__(self, index):
        top, left = torch.randint(3, (2,)).tolist()
        return self.images[index, :, top : top + 12, left : left + 12], index % 4


torch.manual_seed(0)
weights = [1.0 if index % 4 else 3.0 for index in range(64)]
loader = DataLoader(Images(), batch_size=8, sampler=WeightedRandomSampler(weights, 64))
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for _epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
