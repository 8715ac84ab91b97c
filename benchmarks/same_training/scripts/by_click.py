"""Options by click, and several groups of parameters, some of them frozen at first."""

import click
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@click.command()
@click.option("--bs", default=8)
@click.option("--accum-steps", default=1)
def main(bs, accum_steps):
    torch.manual_seed(0)
    inputs = torch.randn(64, 16)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), bs, shuffle=True)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(2)]
    model = nn.Sequential(nn.Linear(16, 32), *blocks, nn.Linear(32, 4))
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1, "lr": 1e-3}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3)
    for _epoch in range(3):
        for number, (x, y) in enumerate(loader, 1):
            (nn.functional.cross_entropy(model(x), y) / accum_steps).backward()
            if number % accum_steps == 0:
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
