"""An image classifier with loader workers, a validation loader and functions of its own."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 12, 12, generator=generator), index % 4


def build_model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(200, 4),
    )  # fmt: skip


def main():
    global model, optimizer, loader, validation, losses
    torch.manual_seed(0)
    loader = DataLoader(Images(), 16, shuffle=True, num_workers=1)
    validation = DataLoader(Images(), 16)
    model, losses = build_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(2):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            correct = sum((model(x).argmax(1) == y).sum().item() for x, y in validation)
    print(losses, correct)


if __name__ == "__main__":
    main()
