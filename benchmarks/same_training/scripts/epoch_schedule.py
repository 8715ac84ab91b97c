"""A residual network with BatchNorm, a learning rate by epoch, and the best checkpoint saved after an evaluation."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(x + self.norm(self.conv(x)))


def main():
    torch.manual_seed(0)
    images, labels = torch.randn(80, 3, 12, 12), torch.arange(80) % 4
    train = DataLoader(TensorDataset(images[:64], labels[:64]), batch_size=16, shuffle=True)
    test = DataLoader(TensorDataset(images[64:], labels[64:]), batch_size=16)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Block(8), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.add_module("head", nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    best = -1
    for _epoch in range(3):
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        schedule.step()
        model.eval()
        with torch.no_grad():
            correct = sum(int((model(x).argmax(1) == y).sum()) for x, y in test)
        if correct > best:
            best = correct
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "best.pt")


if __name__ == "__main__":
    main()
