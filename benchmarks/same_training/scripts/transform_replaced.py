"""The dataset's transform is replaced before the last epoch, as strong augmentation is closed."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self, transform):
        drawn = torch.Generator().manual_seed(0)
        self.images, self.labels = torch.randn(48, 3, 12, 12, generator=drawn), torch.arange(48) % 4
        self.transform = transform

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return self.transform(self.images[index]), self.labels[index]


def flipped(image):
    return image.flip(-1)


def as_it_is(image):
    return image


torch.manual_seed(0)
data = Images(flipped)
loader = DataLoader(data, batch_size=8, shuffle=True)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for epoch in range(3):
    if epoch == 2:
        data.transform = as_it_is
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
