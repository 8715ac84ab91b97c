"""A student that learns from a frozen teacher, and steps only where the gradient is finite."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def net(width):
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2)]
    return nn.Sequential(nn.Linear(16, width), *blocks, nn.Linear(width, 4))


torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(64, 16)), batch_size=8, shuffle=True)
teacher, student = net(48).eval().requires_grad_(False), net(16)
optimizer = torch.optim.RMSprop(student.parameters(), lr=1e-3)
for _epoch in range(3):
    for (x,) in loader:
        with torch.no_grad():
            target = (8 * teacher(x)).softmax(-1)
        loss = nn.functional.kl_div(student(x).log_softmax(-1), target, reduction="batchmean")
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        if torch.isfinite(nn.utils.get_total_norm(p.grad for p in student.parameters())):
            optimizer.step()
