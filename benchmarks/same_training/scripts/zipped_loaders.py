"""Two loaders, zipped: an augmented source and a plain target, as domain adaptation has them."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Domain(Dataset):
    def __init__(self, shift, noise):
        self.samples = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)) + shift
        self.noise = noise

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index] + self.noise * torch.randn(16), int(self.samples[index, 0] > 0)


torch.manual_seed(0)
features = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(features.parameters(), lr=1e-2)
sources = DataLoader(Domain(0.0, 0.3), batch_size=8, shuffle=True)
targets = DataLoader(Domain(0.5, 0.0), batch_size=8)
for _epoch in range(3):
    for (source, labels), (target, _) in zip(sources, targets, strict=True):
        of_source, of_target = features(source), features(target)
        loss = nn.functional.cross_entropy(of_source, labels)
        loss = loss + (of_source.mean(0) - of_target.mean(0)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
