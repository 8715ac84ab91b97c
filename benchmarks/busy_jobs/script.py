"""A script as people write one: a small image classifier, on made-up images, until it is ended."""

import argparse
import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--grad-accum", type=int, default=1)
    flags = parser.parse_args()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(1024, 3, 24, 24), torch.randint(10, (1024,)))
    loader = DataLoader(data, batch_size=flags.batch_size, shuffle=True)
    blocks = [nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU()) for _ in range(4)]
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *blocks, *pooled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in itertools.count():
        for number, (images, labels) in enumerate(loader, 1):
            (nn.functional.cross_entropy(model(images), labels) / flags.grad_accum).backward()
            if number % flags.grad_accum == 0:
                optimizer.step()
                optimizer.zero_grad()
