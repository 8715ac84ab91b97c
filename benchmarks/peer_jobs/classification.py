"""Image classification in the manner of torchvision's references: epochs, meters around the loader, an evaluation and a
checkpoint after each."""

import argparse
import os
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset


class Meter:
    """A mean, and the last value."""

    def __init__(self) -> None:
        self.total, self.count, self.last = 0.0, 0, 0.0

    def update(self, value: float, n: int = 1) -> None:
        self.total, self.count, self.last = self.total + value * n, self.count + n, value

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1)


class MetricLogger:
    """Meters by name, printed every so often while a loader is gone through."""

    def __init__(self) -> None:
        self.meters: dict[str, Meter] = {}

    def update(self, n: int = 1, **values: float) -> None:
        for name, value in values.items():
            self.meters.setdefault(name, Meter()).update(value, n)

    def log_every(self, loader: DataLoader, print_freq: int, header: str) -> Iterator:
        began = time.time()
        for number, batch in enumerate(loader):
            yield batch
            if number % print_freq == 0:
                said = "  ".join(f"{name}: {one.last:.4f} ({one.mean:.4f})" for name, one in self.meters.items())
                print(f"{header} [{number}/{len(loader)}]  {said}  time: {time.time() - began:.2f}", flush=True)


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inplanes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False), nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        narrow = stride == 1 and inplanes == planes
        shortcut = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))
        self.downsample = None if narrow else shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


def resnet(width: int, num_classes: int) -> nn.Module:
    """A small residual network."""
    blocks = [BasicBlock(width, width), BasicBlock(width, 2 * width, 2), BasicBlock(2 * width, 4 * width, 2)]
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, num_classes))


def train_one_epoch(
    model: nn.Module,
    criterion: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    device: torch.device,
    epoch: int,
    print_freq: int,
) -> None:
    model.train()
    logger = MetricLogger()
    for image, target in logger.log_every(loader, print_freq, f"Epoch: [{epoch}]"):
        image, target = image.to(device), target.to(device)
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        accuracy = (output.argmax(1) == target).float().mean().item()
        logger.update(len(image), loss=loss.item(), acc1=accuracy)


def evaluate(model: nn.Module, criterion: nn.Module, loader: DataLoader, device: torch.device, print_freq: int) -> None:
    model.eval()
    logger = MetricLogger()
    with torch.inference_mode():
        for image, target in logger.log_every(loader, print_freq, "Test:"):
            output = model(image.to(device))
            accuracy = (output.argmax(1) == target.to(device)).float().mean().item()
            logger.update(len(image), loss=criterion(output, target.to(device)).item(), acc1=accuracy)


def made_up(num_images: int, size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(num_images)
    images = torch.randn(num_images, 3, size, size, generator=generator)
    return TensorDataset(images, torch.randint(10, (num_images,), generator=generator))


def main(args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    dataset, dataset_test = made_up(args.images, args.size), made_up(64, args.size)
    loader = DataLoader(dataset, args.batch_size, sampler=RandomSampler(dataset), num_workers=args.workers)
    loader_test = DataLoader(dataset_test, args.batch_size, sampler=SequentialSampler(dataset_test))
    model = resnet(args.width, 10).to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    for epoch in range(args.epochs):
        train_one_epoch(model, criterion, optimizer, loader, device, epoch, args.print_freq)
        scheduler.step()
        evaluate(model, criterion, loader_test, device, args.print_freq)
        if args.output_dir:
            checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(checkpoint, os.path.join(args.output_dir, "checkpoint.pth"))


def get_args_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-b", "--batch-size", default=32, type=int)
    parser.add_argument("--epochs", default=90, type=int)
    parser.add_argument("-j", "--workers", default=0, type=int)
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("--label-smoothing", default=0.0, type=float)
    parser.add_argument("--images", default=512, type=int)
    parser.add_argument("--size", default=32, type=int)
    parser.add_argument("--width", default=16, type=int)
    parser.add_argument("--print-freq", default=10, type=int)
    parser.add_argument("--output-dir", default="")
    return parser


if __name__ == "__main__":
    main(get_args_parser().parse_args())
