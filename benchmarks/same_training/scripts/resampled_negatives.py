"""Recommendation: negatives are drawn anew in each epoch, through the loader's dataset."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Ratings(Dataset):
    def __init__(self):
        self.positives = [(n % 16, (n * 7) % 40) for n in range(32)]
        self.negatives = []

    def ng_sample(self):
        self.negatives = [(user, random.randrange(40)) for user, _ in self.positives]

    def __len__(self):
        return 2 * len(self.positives)

    def __getitem__(self, index):
        both = self.positives + self.negatives
        user, item = both[index]
        return user, item, float(index < len(self.positives))


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(16, 8), nn.Embedding(40, 8)
        self.score = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, user, item):
        return self.score(torch.cat([self.users(user), self.items(item)], -1)).squeeze(-1)


random.seed(0)
torch.manual_seed(0)
model = Factors()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(Ratings(), batch_size=8, shuffle=True)
for _epoch in range(3):
    loader.dataset.ng_sample()
    for user, item, label in loader:
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(user, item), label.float())
        loss.backward()
        optimizer.step()
