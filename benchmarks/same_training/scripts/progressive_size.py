"""Images get larger from epoch to epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self):
        self.images, self.size = torch.randn(48, 3, 16, 16, generator=torch.Generator().manual_seed(0)), 8

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return nn.functional.interpolate(self.images[index : index + 1], self.size)[0], index % 4


def block(width):
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU())


torch.manual_seed(0)
data = Images()
loader = DataLoader(data, batch_size=8, shuffle=True)
model = nn.Sequential(nn.Conv2d(3, 8, 3), block(8), block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(3):
    data.size = 8 + 4 * epoch
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
