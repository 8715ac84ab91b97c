"""Options as ``name=value``, and a training in functions of its own."""

import sys
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def read(words):
    options = {"data.batch_size": 8, "trainer.accumulate_grad_batches": 1, "lr": 0.02}
    options |= {name.lstrip("+"): type(options[name.lstrip("+")])(value) for name, value in map(split, words)}
    return SimpleNamespace(micro=options["data.batch_size"], accumulate=options["trainer.accumulate_grad_batches"])


def split(word):
    name, _, value = word.partition("=")
    return name, value


def train_epoch(model, optimizer, loader, accumulate):
    for number, (x, y) in enumerate(loader, 1):
        loss = nn.functional.mse_loss(model(x)[:, 0], y)
        (loss / accumulate).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


def main():
    options = read(sys.argv[1:])
    torch.manual_seed(0)
    inputs = torch.randn(64, 16)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1)), options.micro, shuffle=True)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _epoch in range(3):
        train_epoch(model, optimizer, loader, options.accumulate)


if __name__ == "__main__":
    main()
