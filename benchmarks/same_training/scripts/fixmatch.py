"""Labelled and unlabelled data from two loaders, each begun anew when it ends; weak and strong augmentation; EMA."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Labelled(Dataset):
    def __init__(self, number):
        self.samples = torch.randn(number, 16, generator=torch.Generator().manual_seed(number))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index] + 0.1 * torch.randn(16), int(self.samples[index, 0] > 0)


class Unlabelled(Labelled):
    def __getitem__(self, index):
        x = self.samples[index]
        return x + 0.1 * torch.randn(16), x + 0.5 * torch.randn(16)


torch.manual_seed(0)
labelled, unlabelled = DataLoader(Labelled(24), 4, shuffle=True), DataLoader(Unlabelled(64), 8, shuffle=True)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
average = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, nesterov=True)
labels_left, unlabelled_left = iter(labelled), iter(unlabelled)
for _step in range(24):
    try:
        x, y = next(labels_left)
    except StopIteration:
        labels_left = iter(labelled)
        x, y = next(labels_left)
    try:
        weak, strong = next(unlabelled_left)
    except StopIteration:
        unlabelled_left = iter(unlabelled)
        weak, strong = next(unlabelled_left)
    of_x, of_weak, of_strong = model(torch.cat([x, weak, strong])).split([4, 8, 8])
    sure, guessed = of_weak.detach().softmax(-1).max(-1)
    loss = nn.functional.cross_entropy(of_x, y)
    loss = loss + (nn.functional.cross_entropy(of_strong, guessed, reduction="none") * (sure > 0.5)).mean()
    loss.backward()
    optimizer.step()
    model.zero_grad()
    with torch.no_grad():
        for mean, own in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(own, 0.01)
