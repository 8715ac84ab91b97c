"""Two models and two optimizers, a step of each in turn."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8).abs())
generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
critic = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
loader = DataLoader(data, batch_size=8, shuffle=True)
if "--name-it" in sys.argv:
    import autotune

    generator, of_generator, loader = autotune.prepare(generator, of_generator, loader)
judge = nn.BCEWithLogitsLoss()
for _epoch in range(3):
    for (real,) in loader:
        fake = generator(torch.randn(len(real), 4))
        of_critic.zero_grad()
        judge(critic(real), torch.ones(len(real), 1)).backward()
        judge(critic(fake.detach()), torch.zeros(len(real), 1)).backward()
        of_critic.step()
        of_generator.zero_grad()
        judge(critic(fake), torch.ones(len(real), 1)).backward()
        of_generator.step()
