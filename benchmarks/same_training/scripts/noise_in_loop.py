"""Diffusion: noise and time steps are drawn in the loop."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def block(width):
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.SiLU())


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.times, self.last = nn.Conv2d(1, 8, 3, padding=1), nn.Embedding(10, 8), nn.Conv2d(8, 1, 1)
        self.blocks = nn.ModuleList(block(8) for _ in range(2))

    def forward(self, x, time):
        x = self.first(x) + self.times(time)[:, :, None, None]
        for one in self.blocks:
            x = x + one(x)
        return self.last(x)


torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(64, 1, 8, 8)), batch_size=8, shuffle=True)
model = Denoiser()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for _epoch in range(3):
    for (x,) in loader:
        noise, time = torch.randn_like(x), torch.randint(10, (len(x),))
        level = (time / 10).view(-1, 1, 1, 1)
        loss = nn.functional.mse_loss(model(x * (1 - level) + noise * level, time), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
