"""Sharpness-aware minimization: two passes to a step, and an optimizer around another."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SAM(torch.optim.Optimizer):
    def __init__(self, parameters, base, rho=0.05, **options):
        super().__init__(parameters, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["before"] = p.clone()
            p.add_(p.grad, alpha=float(self.param_groups[0]["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["before"])
        self.base_optimizer.step()
        self.zero_grad()


torch.manual_seed(0)
inputs = torch.randn(128, 16)
data = TensorDataset(inputs, inputs[:, :4].argmax(1))
loader = DataLoader(data, batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
if "--name" in sys.argv:
    import autotune

    named = optimizer if sys.argv[-1] == "sam" else optimizer.base_optimizer
    autotune.prepare(model, named, loader)
for _epoch in range(3):
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.first_step()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.second_step()
