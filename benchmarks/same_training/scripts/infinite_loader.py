"""A loader that never ends and makes its iterator as it is built: to train with mosaics, and then to validate."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self, number, is_mosaic):
        drawn = torch.Generator().manual_seed(number)
        self.images = torch.randn(number, 3, 16, 16, generator=drawn)
        self.labels = torch.randint(0, 4, (number,), generator=drawn)
        self.is_mosaic = is_mosaic

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index].clone()
        if self.is_mosaic:
            other = self.images[random.randrange(len(self))]
            place = random.randrange(8)
            image[:, place : place + 8, :8] = other[:, :8, :8]
        return image, self.labels[index]


class Again:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class InfiniteDataLoader(DataLoader):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Again(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


def block(width):
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())


random.seed(0)
torch.manual_seed(0)
train, validation = (
    InfiniteDataLoader(Images(64, True), batch_size=16, shuffle=True),
    InfiniteDataLoader(Images(8, False), batch_size=8),
)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), block(8), block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(3):
    model.train()
    for images, labels in train:
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        correct = sum((model(images).argmax(1) == labels).sum().item() for images, labels in validation)
    print(epoch, loss.item(), correct)
