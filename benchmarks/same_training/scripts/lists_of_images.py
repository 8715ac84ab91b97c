"""Detection: batches are lists of images of unequal sizes, by a collate of its own; the model returns its losses."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(index)
        image = torch.randn(3, 8 + index % 4, 10, generator=drawn)
        return image, {"boxes": torch.rand(1 + index % 3, 4, generator=drawn), "label": torch.tensor(index % 4)}


def collate(samples):
    return tuple(zip(*samples, strict=True))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.box, self.kind = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, images, targets):
        features = torch.stack([self.body(image[None]).mean((0, 2, 3)) for image in images])
        boxes, labels = torch.stack([one["boxes"].mean(0) for one in targets]), [one["label"] for one in targets]
        found = {"box": nn.functional.l1_loss(self.box(features), boxes)}
        return found | {"kind": nn.functional.cross_entropy(self.kind(features), torch.stack(labels))}


torch.manual_seed(0)
loader = DataLoader(Images(), batch_size=4, shuffle=True, collate_fn=collate)
model = Detector()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
for _epoch in range(3):
    for images, targets in loader:
        loss = sum(model(images, targets).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
