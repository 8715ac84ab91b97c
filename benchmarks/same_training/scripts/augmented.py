"""Images flipped and shifted by Python's own generator, and loader workers."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self):
        self.images = torch.randn(48, 3, 12, 12, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 48

    def __getitem__(self, index):
        image = self.images[index] * random.uniform(0.8, 1.2)
        return (image.flip(-1) if random.random() < 0.5 else image), index % 4


def block(width):
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())


if __name__ == "__main__":
    random.seed(0)
    torch.manual_seed(0)
    loader = DataLoader(Images(), batch_size=8, shuffle=True, num_workers=1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), block(8), block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.append(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
